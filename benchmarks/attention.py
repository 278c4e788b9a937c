"""Packed attention on a GPU with each kernel: time, rate, and error relative to float32.

    python benchmarks/attention.py

The cases are those of a training step of Qwen2.5-VL: images and windows of the vision tower (head size 80), and rows of the 3B
and 7B decoders. The rate counts 4 * length^2 * heads * width operations forward (half of it if causal) and 2.5 times as
many backward. The error is |x - x32| / |x32| of output and of the gradients of queries, keys and values, where x32 is
scaled-dot-product attention in float32.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # its dataproto.py is not the library
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from dataproto.errors import InvalidConfig  # noqa: E402
from workers.model import flash_attention4 as flash4  # noqa: E402
from workers.model.attention import FLASH_KERNELS  # noqa: E402
from workers.model.segment_attention import Segments, segment_sdpa  # noqa: E402

REPEATS = 10


def lengths(low: int, high: int, count: int, seed: int = 0) -> list[int]:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# segments, heads of queries, heads of keys, width of a head, causal
CASES = {
    "images": (lengths(500, 5000, 12), 16, 16, 80, False),
    "windows": ([64] * 600 + lengths(8, 64, 60), 16, 16, 80, False),
    "3B rows": (lengths(600, 3000, 9), 16, 2, 128, True),
    "7B rows": (lengths(600, 3000, 5), 28, 4, 128, True),
}


def milliseconds(work: Callable[[], object]) -> float:
    """Mean of `REPEATS` runs, after two warm-up runs."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS * 1000


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def measure(case: str, kernels: Sequence[str]) -> Iterator[str]:
    """The line of the table for each kernel."""
    segments, heads, key_heads, width, causal = CASES[case]
    torch.manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(segments).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    total, longest = sum(segments), max(segments)
    upstream = torch.randn(total, heads, width, device="cuda", dtype=torch.bfloat16)
    inputs = [
        torch.randn(total, count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]
    whole = [x.detach().float().requires_grad_() for x in inputs]
    at = Segments(bounds, bounds, longest, longest, causal)
    out = segment_sdpa(*whole, at, None)
    expected = [out.detach(), *torch.autograd.grad(out, whole, upstream.float())]
    operations = 4 * sum(length**2 for length in segments) * heads * width / (2 if causal else 1)
    for name in kernels:
        forward = partial(FLASH_KERNELS[name], *inputs, at, None)
        found = [(first := forward()).detach(), *torch.autograd.grad(first, inputs, upstream)]
        ahead = milliseconds(forward)
        back = milliseconds(lambda run=forward: torch.autograd.grad(run(), inputs, upstream)) - ahead
        rates = operations / ahead / 1e9, 2.5 * operations / back / 1e9
        apart = ", ".join(f"{distance(*pair):.1e}" for pair in zip(found, expected, strict=True))
        yield f"| {case} | {name} | {ahead:.2f} | {rates[0]:.0f} | {back:.2f} | {rates[1]:.0f} | {apart} |"


def main() -> None:
    kernels = list(FLASH_KERNELS)
    try:
        flash4.check_usable()
    except InvalidConfig as error:
        print(error)
        kernels.remove("fa4")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| case | kernel | forward ms | TFLOP/s | backward ms | TFLOP/s | error: output, dq, dk, dv |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for line in measure(case, kernels):
            print(line, flush=True)


if __name__ == "__main__":
    main()
