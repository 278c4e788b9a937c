"""What a training step requires and what of the device it uses, in verl's metric names.

The operations counted are those the step requires: each distinct image once, a prompt that rows share once, logits of response
tokens alone, and nothing that is computed again (activation checkpointing, chunks of logits). MFU is their number over the time
of the whole step and the device's peak.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dataproto import DataProto
from workers.packed import PackedVLM
from workers.step import media_of, sharing

# Dense bfloat16 operations per second by the makers' data sheets; the first name that is part of the device's counts.
PEAKS = (
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H200", 989e12),  # the GH200 too
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second of a known accelerator, ``None`` for others and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)


@dataclass(frozen=True)
class Work:
    """Operations of forward and backward pass, and packed tokens, prompts that rows share counted once."""

    vision: float = 0.0
    language: float = 0.0
    tokens: int = 0

    @property
    def total(self) -> float:
        return self.vision + self.language

    def __add__(self, other: "Work") -> "Work":
        return Work(self.vision + other.vision, self.language + other.language, self.tokens + other.tokens)


def required_work(module: PackedVLM, data: DataProto) -> Work:
    """What one update over ``data`` requires.

    The backward pass takes twice the forward pass where weights are trained, once where gradients only pass through (a
    decoder with adapters), and nothing in a frozen vision tower.
    """
    family, config = module.family, module.model.config
    attended, width = data["attention_mask"], data["response_mask"].shape[1]
    whole = attended.sum(1)
    saved = torch.where(sharing(data), attended[:, : attended.shape[1] - width].sum(1), 0)
    logit_tokens = int(data["response_mask"].sum()) if module.makes_logits else 0
    rows = family.flops(config, whole, _distinct_grids(module, data), logit_tokens=logit_tokens)
    # Segments of response tokens alone see the keys of their prompt: all of the row's pairs but those within the prompt.
    shared = family.flops(config, saved, logit_tokens=0)
    return Work(
        vision=rows.vision * _passes(module, family.vision_tower, frozen=1),
        language=(rows.language - shared.language) * _passes(module, family.decoder_layers, frozen=2),
        tokens=int((whole - saved).sum()),
    )


def whole_work(stages: Sequence[Work]) -> Work:
    """What the update requires, from what each stage of a pipeline makes of it: those without a tower know no training of it."""
    vision, language = (max(getattr(work, part) for work in stages) for part in ("vision", "language"))
    return Work(vision, language, stages[0].tokens)


def _distinct_grids(module: PackedVLM, data: DataProto) -> torch.Tensor | None:
    """Grids ``(N, 3)`` of the images and videos that rows hold, each object once."""
    pictures, config = module.family.pictures, module.model.config
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for kind in ("image", "video"):
        for row in media_of(data):
            held = {name: row[name] for name in pictures.names(kind) if row.get(name) is not None}
            key = tuple(map(id, held.values()))
            if held and key not in found:
                found[key] = pictures.grids(kind, held, config).cpu()
    return torch.cat(list(found.values())) if found else None


def _passes(module: PackedVLM, path: str, frozen: int) -> int:
    """Forward passes' worth of operations: 3 where the weights of a submodule themselves (not adapters) are trained."""
    parameters = module.model.get_submodule(path).named_parameters()
    return 3 if any(weight.requires_grad for name, weight in parameters if "lora_" not in name) else frozen


class Accounting:
    """Counts and times what a worker does between `start` and `metrics`.

    >>> accounting = Accounting(torch.device("cpu"))
    >>> with accounting.phase("forward"):
    ...     accounting.add(Work(vision=1e9, language=3e9, tokens=100))
    >>> sorted(accounting.metrics("actor"))
    ['perf/throughput/actor', 'timing_s/update_actor/forward']
    """

    def __init__(self, device: torch.device, devices: int = 1) -> None:
        """``devices`` share the work that is added (sp x tp x pp)."""
        self.device, self.devices = device, devices
        self.peak = peak_flops(device)
        self.start()

    def start(self) -> None:
        """Forgets what was before."""
        self.work = Work()
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.started = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def add(self, work: Work) -> None:
        """More work is going to be done."""
        self.work += work

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; on CUDA by the device's own clock, so that nothing waits."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self.events.append((name, begin, end))
        else:
            begin_at = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - begin_at

    def metrics(self, role: str) -> dict[str, float]:
        """The figures since `start`.

        ``perf/mfu/<role>`` counts the whole model and ``perf/mfu/<role>/language`` the language model alone, both over the
        time of everything; they are absent where the device's peak is not known.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = time.perf_counter() - self.started
        for name, begin, end in self.events:
            self.seconds[name] += begin.elapsed_time(end) / 1e3
        found = {f"timing_s/update_{role}/{name}": seconds for name, seconds in self.seconds.items()}
        found[f"perf/throughput/{role}"] = self.work.tokens / total / self.devices
        if self.peak is not None:
            possible = total * self.peak * self.devices
            found[f"perf/mfu/{role}"] = self.work.total / possible
            found[f"perf/mfu/{role}/language"] = self.work.language / possible
        if self.device.type == "cuda":
            found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(self.device) / 2**30
        return found
