"""Options of the models that training runs: precision, memory, speed, which weights are trained, and the optimizer.

Imports no torch, so that a command shows its options at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dataproto.errors import InvalidConfig, check_at_least

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How the losses of tokens become one number; see `workers.training.loss_sums`."""

Unsharded = Literal["auto", "nothing", "scoring", "weights", "gradients"]
"""What FSDP leaves unsharded between micro-batches; each value includes those before it.

- ``nothing``: a layer's weights are gathered for each use and freed, gradients are reduced after each micro-batch.
- ``scoring``: in passes without gradients, weights are gathered once a call.
- ``weights``: in updates, weights are gathered once an optimizer step.
- ``gradients``: they add up unsharded, in float32, and are reduced once an optimizer step.
- ``auto``: on CUDA the most that leaves a device some room, by the memory that the second update and the fourth call that
  scores took with nothing unsharded. If a device runs out of memory later, less. On a CPU ``nothing``.
"""
UNSHARDED: tuple[Unsharded, ...] = ("nothing", "scoring", "weights", "gradients")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of the forward and backward pass.

    Except for what is frozen (``freeze_*``) and the adapters (``lora_*``), they change speed and memory, and results only by
    rounding.

    Attributes:
        token_budget: tokens of a micro-batch on each rank; ranks along sp share a micro-batch of sp times as many
        scoring_token_budget: tokens of a micro-batch in passes without gradients, which keep no activations; default:
            twice the token budget
        dtype: type of the computation; auto: bfloat16 on CUDA
        activation_checkpointing: what the backward pass recomputes
        compile: compile the repeated layers with torch.compile
        flash_attention: attention kernel on CUDA: torch's, or FlashAttention 4 (the extra "fa4")
        unsharded: what stays unsharded on every rank of dp x sp from one micro-batch to the next; auto: the most that
            leaves room
        offload: keep sharded weights, gradients and optimizer in host memory
        offload_idle: keep weights in host memory while another role or the engine works, and the optimizer's state
            between optimizer steps
        freeze_vision: do not train the vision tower, and run it without gradients
        freeze_language: train only the vision tower and its connector
        mtp_coef: weight of the loss of the head that predicts the token after the next one, which is trained on the responses
            next to the policy and drafts for the hf engine; 0: the head stays as it is
        lora_rank: rank of adapters in the decoder's linear layers and experts, which are trained in place of the weights;
            0: none
        lora_alpha: scale of an adapter's output, times the rank
        lora_vision: adapt the vision tower too; without it, adapters leave the tower frozen
        load_in_4bit: keep the decoder's weights under adapters in 4 bits (NF4; the extra "torchao")
        pipeline_layers: decoder layers of each stage, in order; default: split by cost
    """

    token_budget: int = 16_384
    scoring_token_budget: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    flash_attention: Literal["torch", "fa4"] = "torch"
    unsharded: Unsharded = "auto"
    offload: bool = False
    offload_idle: bool = False
    freeze_vision: bool = False
    freeze_language: bool = False
    mtp_coef: float = 0.0
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_vision: bool = False
    load_in_4bit: bool = False
    pipeline_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, "token_budget", "scoring_token_budget")
        check_at_least(0, self, "mtp_coef", "lora_rank")
        if not self.lora_alpha > 0:
            raise InvalidConfig(f"lora_alpha={self.lora_alpha}: must be above 0")
        if self.lora_vision and (not self.lora_rank or self.freeze_vision):
            raise InvalidConfig(
                f"lora_vision=True adapts the vision tower: it needs lora_rank above 0 (now {self.lora_rank}) and "
                "freeze_vision=False"
            )
        if self.offload and self.offload_idle:
            raise InvalidConfig("offload=True keeps everything in host memory: leave offload_idle out")
        if self.load_in_4bit and not self.lora_rank:
            raise InvalidConfig("load_in_4bit=True is for weights under adapters: it needs lora_rank above 0")
        if self.freeze_language and (self.freeze_vision or self.lora_rank):
            raise InvalidConfig(
                f"freeze_language=True trains only the vision tower: it needs freeze_vision=False (now {self.freeze_vision}) "
                f"and lora_rank=0 (now {self.lora_rank})"
            )
        if self.mtp_coef and (self.lora_rank or self.freeze_language):
            raise InvalidConfig(
                f"mtp_coef={self.mtp_coef} trains weights of the checkpoint next to the policy's: it needs lora_rank=0 (now "
                f"{self.lora_rank}) and freeze_language=False (now {self.freeze_language})"
            )

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [(not self.lora_rank, "lora-alpha", "there are no adapters: add --lora-rank")]

    def budget(self, backward: bool) -> int:
        """Tokens of a micro-batch on each rank, with a backward pass or without.

        >>> ModelConfig(token_budget=100).budget(backward=True), ModelConfig(token_budget=100).budget(backward=False)
        (100, 200)
        """
        if backward:
            return self.token_budget
        return self.scoring_token_budget or 2 * self.token_budget

    def leaves_unsharded(self, what: Unsharded) -> bool:
        """Whether ``what`` stays unsharded from one micro-batch to the next.

        >>> [ModelConfig(unsharded="weights").leaves_unsharded(what) for what in UNSHARDED]
        [True, True, True, False]
        """
        return self.unsharded != "auto" and UNSHARDED.index(what) <= UNSHARDED.index(self.unsharded)


OptimizerKind = Literal["adamw", "adamw8bit", "muon"]
"""How an optimizer step changes the weights.

- ``adamw``: AdamW (Loshchilov & Hutter 2019) with moments in float32, 8 bytes a parameter.
- ``adamw8bit``: the same with moments of 8 bits (arXiv:2110.02861), 2 bytes a parameter.
- ``muon``: Muon for the matrices of the layers, 4 bytes a parameter, and AdamW for embeddings, head, norms, biases and fused
  experts.
"""


SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[int, int], float]
"""``schedule(step, total_steps)`` to the share of the learning rate at optimizer step ``step``, from 0."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule, counted in optimizer steps.

    Attributes:
        lr: learning rate after the warm-up
        kind: kind of optimizer: AdamW, AdamW with moments of 8 bits (the extra "torchao"), or Muon for the matrices of
            the layers
        betas: AdamW's decay of the means of gradients and of their squares
        weight_decay: decay decoupled from the gradient; the weights shrink by lr times this in a step
        schedule: how the learning rate falls after the warm-up: constant, linear, cosine, or FILE.py:FUNCTION, the function
            of an optimizer step and their number that gives the share of lr
        warmup_steps: optimizer steps in which the learning rate rises linearly
        total_steps: optimizer steps of the whole schedule; default: those of the run
        min_lr_ratio: last learning rate of a schedule as a share of lr
        max_grad_norm: norm to which larger gradients are scaled down
    """

    lr: float = 1e-6
    kind: OptimizerKind = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    schedule: str | Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(0, self, "lr", "weight_decay", "warmup_steps", "min_lr_ratio", "max_grad_norm")
        if not self.max_grad_norm > 0:
            raise InvalidConfig(f"max_grad_norm={self.max_grad_norm}: must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidConfig(f"betas={self.betas}: must be at least 0 and below 1")
        _check_float32(self, "lr", "weight_decay")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES and ":" not in self.schedule:
            raise InvalidConfig(f"schedule={self.schedule}: must be one of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION")
        if self.schedule != "constant" and self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise InvalidConfig(f"total_steps={self.total_steps} must be above warmup_steps={self.warmup_steps}")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (
                self.schedule == "constant",
                "min-lr-ratio total-steps",
                "the rate is constant: add {group}schedule linear or cosine",
            )
        ]


LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
SMALLEST_EPS = 2.0**-126
"""The smallest number that float32 holds in full precision."""


def _check_float32(config: object, *names: str) -> None:
    """Raises `InvalidConfig` for the first of a configuration's numbers that is too large, or none."""
    for name in names:
        if not (value := getattr(config, name)) <= LARGEST_FLOAT32:
            raise InvalidConfig(f"{name}={value}: must be at most {LARGEST_FLOAT32:g}, the largest number of float32")


@dataclass(frozen=True)
class AdamParams:
    """Settings of one step, for training step by step; names and defaults are those of the ``tinker`` package."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: gradients are not clipped

    def __post_init__(self) -> None:
        _check_float32(self, "learning_rate", "eps", "weight_decay")
        check_at_least(0, self, "learning_rate", "grad_clip_norm", "weight_decay")
        if self.eps < SMALLEST_EPS:
            raise InvalidConfig(
                f"eps={self.eps}: must be at least {SMALLEST_EPS:g}, as AdamW divides 0 by eps where a weight has had no "
                "gradient; an adapter's first step would leave NaN"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise InvalidConfig(f"beta1={self.beta1} and beta2={self.beta2}: must be at least 0 and below 1")
