"""Log-probs of target tokens from hidden states, forward and backward: ours, Liger's fused losses, and full logits.

    python benchmarks/log_probs.py                                                        # a 7B head on a GPU
    python benchmarks/log_probs.py --tokens 512 --hidden 64 --vocabulary 4096             # on a CPU

Each side ends in one number whose gradient goes to states and weight. Liger (``pip install liger-kernel``, on a GPU) computes
gradients in its forward pass, where it has to know the loss; by default it sums the gradient of the weight in bfloat16, ours in
float32. Memory is the peak beyond the inputs.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # its dataproto.py is not the library
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from workers.model.logprobs import token_log_probs  # noqa: E402

REPEATS = 5


class Head:
    """Hidden states, weight and targets of one size."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.states = torch.randn(tokens, hidden, device=device).to(self.dtype).requires_grad_()
        self.weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).to(self.dtype).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,), device=device)

    def ours(self, compiled: bool) -> None:
        log_probs, _ = token_log_probs(self.states, self.weight, self.targets, compiled=compiled)
        log_probs.mean().backward()

    def full_logits(self) -> None:
        logits = torch.nn.functional.linear(self.states, self.weight).float()
        logits.log_softmax(-1).gather(1, self.targets[:, None]).mean().backward()

    def liger_sides(self) -> dict[str, Callable[[], None]]:
        """Liger's losses, if they are installed."""
        if self.device.type != "cuda":
            return {}
        try:
            from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
            from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            print("liger-kernel is not installed: skipped")
            return {}
        half, whole = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=True, temperature=1.0)
        rows = 8
        states, targets = self.states.view(rows, -1, self.states.shape[1]), self.targets.view(rows, -1)
        mask, advantages = torch.ones_like(targets, dtype=torch.float32), torch.randn(rows, device=self.device)
        return {
            "Liger, linear cross-entropy, weight's gradient in bfloat16": lambda: half(
                self.weight, self.states, self.targets
            ).backward(),
            "the same, in float32 as ours": lambda: whole(self.weight, self.states, self.targets).backward(),
            "Liger, linear GRPO loss": lambda: grpo(states, self.weight, targets, mask, advantages)[0].backward(),
        }

    def sides(self) -> dict[str, Callable[[], None]]:
        compiled = {"ours, compiled": lambda: self.ours(True)} if self.device.type == "cuda" else {}
        return compiled | {"ours": lambda: self.ours(False)} | self.liger_sides() | {"full logits": self.full_logits}

    def clear(self) -> None:
        self.states.grad = self.weight.grad = None


def measure(head: Head, side: Callable[[], None]) -> tuple[float, float | None]:
    """Milliseconds, and on a GPU the peak memory beyond the inputs in GiB."""
    on_gpu = head.device.type == "cuda"
    for _ in range(2):
        side()
        head.clear()
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(REPEATS):
        side()
        head.clear()
    if on_gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) / REPEATS * 1000
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None


def distances(head: Head, side: Callable[[], None]) -> tuple[float, float]:
    """|g - g32| / |g32| of the gradients of states and weight, where g32 is that of full logits in float32."""
    exact = Head.__new__(Head)
    exact.states, exact.weight = (x.detach().float().requires_grad_() for x in (head.states, head.weight))
    exact.targets = head.targets
    exact.full_logits()
    side()

    def apart(found: Tensor, expected: Tensor) -> float:
        return float((found.float() - expected).norm() / expected.norm())

    found = apart(head.states.grad, exact.states.grad), apart(head.weight.grad, exact.weight.grad)
    head.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 8 (default: 8192)")
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = Head(arguments.tokens, arguments.hidden, arguments.vocabulary, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {arguments.tokens} x {arguments.hidden} x {arguments.vocabulary}")
    print("| side | ms | GiB beyond inputs |\n| --- | --- | --- |")
    for label, side in head.sides().items():
        milliseconds, memory = measure(head, side)
        print(f"| {label} | {milliseconds:.1f} | {'' if memory is None else f'{memory:.1f}'} |", flush=True)
    small = Head(512, arguments.hidden, arguments.vocabulary, device)
    states, weight = distances(small, lambda: small.ours(False))
    print(f"ours, 512 tokens, distance from float32: gradient of states {states:.1e}, of the weight {weight:.1e}")


if __name__ == "__main__":
    main()
