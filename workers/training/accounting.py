"""The work, time and memory of a training step, under verl's metric names.

Only operations that the step requires are counted: each distinct image once, a shared prompt once, logits of response tokens
alone, and nothing that is computed again (activation checkpointing, chunks of logits). MFU is their number divided by the time of
the whole step and the peak of the devices.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import counters

from dataproto import DataProto
from dataproto.vlm.media import distinct_parts
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import AXES, Ranks
from workers.training.forward_pass import media_of, shared_tokens
from workers.training.memory import PHASES, DeviceMemory, real_peak

# Dense bfloat16 operations per second from data sheets; the first name that is part of the device's name counts.
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
    """Operations of forward and backward pass, and packed tokens; a shared prompt counts once."""

    vision: float = 0.0
    language: float = 0.0
    tokens: int = 0

    @property
    def total(self) -> float:
        return self.vision + self.language

    def __add__(self, other: "Work") -> "Work":
        return Work(self.vision + other.vision, self.language + other.language, self.tokens + other.tokens)


def required_work(module: PackedVLM, data: DataProto) -> Work:
    """The work that one update over ``data`` requires.

    The backward pass takes twice the work of the forward pass where weights are trained, the same work where gradients only pass
    through (a decoder with adapters), and none in a frozen vision tower.
    """
    family, config = module.family, module.model.config
    whole, saved = data["attention_mask"].sum(1), shared_tokens(module, data)
    logit_tokens = int(data["response_mask"].sum()) if module.makes_logits else 0
    rows = family.flops(config, whole, _distinct_grids(module, data), logit_tokens=logit_tokens)
    # Segments that hold only response tokens see the keys of their prompt: all pairs of the row except those within the prompt.
    shared = family.flops(config, saved, logit_tokens=0)
    return Work(
        vision=rows.vision * _passes(module, family.vision_tower, frozen=1) if family.vision_tower else 0.0,
        language=(rows.language - shared.language) * _passes(module, family.decoder_layers, frozen=2),
        tokens=int((whole - saved).sum()),
    )


def whole_work(stages: Sequence[Work]) -> Work:
    """The work of an update, from the counts of each pipeline stage: only the stage with the tower knows that it is trained."""
    vision, language = (max(getattr(work, part) for work in stages) for part in ("vision", "language"))
    return Work(vision, language, stages[0].tokens)


def _distinct_grids(module: PackedVLM, data: DataProto) -> torch.Tensor | None:
    """Grids ``(N, 3)`` of the rows' media, each distinct object once."""
    layout, config = module.family.media_layout, module.model.config
    found = [layout.grids(kind, part, config).cpu() for kind, part in distinct_parts(media_of(data), layout)]
    return torch.cat(found) if found else None


def _passes(module: PackedVLM, path: str, frozen: int) -> int:
    """Work of forward and backward pass in forward passes: 3 if weights of a submodule, other than adapters, are trained."""
    parameters = module.model.get_submodule(path).named_parameters()
    return 3 if any(weight.requires_grad for name, weight in parameters if "lora_" not in name) else frozen


@dataclass(frozen=True)
class Figures:
    """One rank's work, time and memory in an update."""

    work: Work  # of its rows; empty if another rank with the same rows counts them
    seconds: float  # of the whole update
    phases: Mapping[str, float]  # seconds
    peak: float | None  # operations per second of its device, if known
    memory: Mapping[str, float]  # metric to bytes
    incidents: Mapping[str, int] = field(default_factory=dict)  # metric to how often it happened


def retries(device: torch.device) -> dict[str, int]:
    """How often a CUDA device had no memory left, so that torch waited for it and freed its cache, since this process began."""
    return {"perf/allocator_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0)}


def incidents(device: torch.device) -> dict[str, int]:
    """What slows a step down without an error: `retries`, and the graphs that ``torch.compile`` has compiled."""
    compiled = {"perf/compilations": counters["stats"]["unique_graphs"]}
    return compiled | (retries(device) if device.type == "cuda" else {})


def joined_metrics(figures: Sequence[Figures], role: str) -> dict[str, float]:
    """Metrics of an update from the figures of all its ranks.

    - ``timing_s/update_<role>/<phase>``: of the slowest rank.
    - ``perf/throughput/<role>``: packed tokens of all ranks per second, of the slowest, and device.
    - ``perf/mfu/<role>``: operations of all ranks over the time of the slowest and the peak of all devices together, and
      ``perf/mfu/<role>/language`` of the language model only; absent where a device's peak is not known.
    - ``perf/max_memory_allocated_gb`` and ``perf/max_memory_reserved_gb``: of the fullest device, in GiB.
    - ``perf/memory_gb/<phase>`` and ``perf/memory_gb/<phase>/left``: the peak of a phase and what it left, of the fullest device,
      in GiB; of the phases that ended since the last update, itself not included.
    - ``perf/compilations`` since the last update and ``perf/allocator_retries`` in this one: of the rank with the most; see
      `incidents`.

    >>> ranks = [Figures(Work(1e12, 3e12, 100), 2.0, {"forward": 1.0}, 4e12, {}, {"perf/compilations": 2})]
    >>> ranks.append(Figures(Work(), 1.0, {}, 4e12, {}))
    >>> for name, value in joined_metrics(ranks, "actor").items():
    ...     print(name, value)
    timing_s/update_actor/forward 1.0
    perf/throughput/actor 25.0
    perf/mfu/actor 0.25
    perf/mfu/actor/language 0.1875
    perf/compilations 2
    """
    work, seconds = sum((each.work for each in figures), Work()), max(each.seconds for each in figures)
    found: dict[str, float] = {}
    for each in figures:
        for phase, taken in each.phases.items():
            name = f"timing_s/update_{role}/{phase}"
            found[name] = max(found.get(name, 0.0), taken)
    found[f"perf/throughput/{role}"] = work.tokens / seconds / len(figures)
    peaks = [each.peak for each in figures if each.peak is not None]
    if len(peaks) == len(figures):
        found[f"perf/mfu/{role}"] = work.total / (seconds * sum(peaks))
        found[f"perf/mfu/{role}/language"] = work.language / (seconds * sum(peaks))
    for name in figures[0].memory:
        found[name] = max(each.memory.get(name, 0.0) for each in figures) / 2**30
    for name in figures[0].incidents:
        found[name] = max(each.incidents.get(name, 0) for each in figures)
    return found


class Accounting:
    """Counts and times the work of a model while it is `recording`.

    >>> accounting = Accounting(torch.device("cpu"))
    >>> with accounting.recording():
    ...     with accounting.phase("forward"):
    ...         accounting.add(Work(vision=1e9, language=3e9, tokens=100))
    ...     sorted(accounting.metrics("actor"))
    ['perf/compilations', 'perf/throughput/actor', 'timing_s/update_actor/forward']
    """

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        """``ranks`` work on the same updates."""
        self.device, self.ranks = device, ranks or Ranks()
        self.peak = peak_flops(device)
        self._forget()
        self._incidents = incidents(device)
        PHASES.taken()  # those of an earlier run in this process

    def _forget(self) -> None:
        self.active = False
        self.work = Work()
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records until the end of the block; outside of it nothing is timed and nothing kept."""
        self._forget()
        self.active, self.started = True, time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = DeviceMemory.of(self.device)
            self._incidents |= retries(self.device)
        try:
            yield
        finally:
            self._forget()

    def add(self, work: Work) -> None:
        """Adds work that is about to be done."""
        self.work += work

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block; on CUDA by events of the device, so that the host does not wait."""
        if not self.active:
            yield
        elif self.device.type == "cuda":
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
        """Metrics of all ranks since `recording` began; every rank calls it. See `joined_metrics`."""
        memory: dict[str, float] = {}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            moments = self.before, DeviceMemory.of(self.device)
            memory["perf/max_memory_allocated_gb"] = real_peak(torch.cuda.max_memory_allocated(self.device), *moments)
            memory["perf/max_memory_reserved_gb"] = real_peak(torch.cuda.max_memory_reserved(self.device), *moments)
        memory |= PHASES.taken()
        seconds = time.perf_counter() - self.started
        for name, begin, end in self.events:
            self.seconds[name] += begin.elapsed_time(end) / 1e3
        counts = all(self.ranks.rank(axis) == 0 for axis in ("pp", "sp", "tp"))  # others have the same rows
        before, self._incidents = self._incidents, incidents(self.device)
        happened = {name: max(number - before[name], 0) for name, number in self._incidents.items()}
        mine = Figures(self.work if counts else Work(), seconds, dict(self.seconds), self.peak, memory, happened)
        return joined_metrics(self.ranks.all_gather(mine, *AXES), role)
