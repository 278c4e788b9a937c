"""Supervised training, then GRPO, on real questions about pictures: ``dataproto easy-vqa``.

With no arguments it reads the pictures and questions of the package ``easy-vqa`` (extra ``easy-vqa``), makes a small Qwen2.5-VL,
shows it some answers, and lets GRPO continue from there, on the CPU within minutes. The model writes its answer in words, and the
reward compares the text. With ``--preset any`` and ``--model-path`` the same two phases train any checkpoint of a known family.

The run's directory is that of GRPO; its folder ``sft`` is that of the supervised phase. Each evaluation also measures two
controls: the same questions with other rows' pictures, and without pictures.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import InvalidConfig, check_at_least
from recipes.configs.grpo_config import GRPOConfig, GRPORunConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

OUTPUT_DIR = Path("outputs/easy_vqa")


@dataclass(frozen=True)
class SFTPhaseConfig:
    """The supervised phase, in which the model learns the form of an answer.

    Attributes:
        steps: updates of the supervised phase; 0: GRPO starts from --model-path as it is
        batch_size: questions of a supervised update
    """

    steps: int = 100
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))

    def __post_init__(self) -> None:
        check_at_least(0, self, "steps", group="sft.")
        check_at_least(1, self, "batch_size", group="sft.")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [(not self.steps, "batch-size optimizer.", "there is no supervised phase: leave out --sft.steps 0")]


@dataclass(frozen=True)
class EasyVQADataConfig(DataConfig):
    """Questions about pictures, which are those of easy-VQA.

    Attributes:
        data_path: folder of an unpacked wheel of easy-vqa 1.0, or of its layout; by default the installed package
        eval_data_path: leave it out: easy-VQA has its own test questions
        level: leave it out: the questions of easy-VQA have no level
    """

    def __post_init__(self) -> None:
        if self.eval_data_path or self.keys.given():
            raise InvalidConfig("easy-VQA has its own test questions and columns: leave out --eval-data-path and keys")
        super().__post_init__()


@dataclass(frozen=True)
class EasyVQAConfig(GRPORunConfig):
    """A run of both phases.

    Attributes:
        reward: reward function: FILE.py:FUNCTION in verl's, EasyR1's or TRL's form, classifier:MODEL, or a URL; default:
            1 for a right answer
    """

    data: EasyVQADataConfig = field(default_factory=EasyVQADataConfig)
    sft: SFTPhaseConfig = field(default_factory=SFTPhaseConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent is not None:
            raise InvalidConfig("--agent: a question of easy-VQA has one answer: run dataproto grpo")
        if not self.sft.steps and self.model_path is None:
            raise InvalidConfig("sft.steps=0 needs --model-path: the small model has random weights")
        if self.run.epochs is not None:
            raise InvalidConfig("the two phases have their own lengths: give --sft.steps and --steps, not --epochs")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            *super().idle_options(),
            (True, "level instruction on-bad-row media-root", "the questions of easy-VQA have none: leave it out"),
        ]


# For a model of under a million parameters, on two cores.
TINY = EasyVQAConfig(
    preset="tiny",
    sft=SFTPhaseConfig(
        steps=1500, optimizer=OptimizerConfig(lr=1.5e-3, betas=(0.9, 0.95), schedule="cosine", warmup_steps=20)
    ),
    data=EasyVQADataConfig(batch_size=64, eval_rows=512, max_prompt_length=128, max_response_length=4, instruction=""),
    algorithm=GRPOConfig(n=8, entropy_coef=0.02),
    optimizer=OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), warmup_steps=10),
    run=RunConfig(steps=100, eval_every=25, save_every=50, output_dir=OUTPUT_DIR),
)
ANY = EasyVQAConfig(data=EasyVQADataConfig(batch_size=64, eval_rows=512, max_prompt_length=512, max_response_length=16))
PRESETS = {"tiny": TINY, "any": ANY}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto easy-vqa")
