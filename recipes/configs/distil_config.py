"""On-policy distillation (GKD, arXiv:2306.13649; Thinking Machines, 2025): ``dataproto distil --teacher CHECKPOINT``.

The student samples, and the teacher, in the place of the reference, scores the student's tokens. The advantage of a token is
the difference of their log-probs (`recipes.algorithms.reverse_kl_advantage`). Rewards are only measured. Without
``--model-path`` the student is a small Qwen2.5-VL made on the spot, which a model that ``dataproto grpo`` has trained can teach.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, PolicyGradientConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

if TYPE_CHECKING:
    from rollout.prompts import PromptBuilder
    from workers.roles.actor import ActorConfig
    from workers.roles.model_worker import PolicyConfig

OUTPUT_DIR = Path("outputs/distil")


@dataclass(frozen=True)
class DistilConfig(AlgorithmConfig):
    """The algorithm's settings.

    Attributes:
        n: samples of each prompt
        advantage: what a token is worth: how much likelier the teacher finds it
    """

    n: int = 4
    advantage: str = "reverse_kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage != "reverse_kl" or self.kl_coef:
            raise InvalidConfig(
                f"algorithm.advantage={self.advantage}, kl_coef={self.kl_coef}: distillation has the reverse "
                "KL to the teacher as its advantage, and no other KL term; for other advantages run dataproto grpo"
            )


@dataclass(frozen=True)
class DistilRunConfig(PolicyGradientConfig):
    """A run of on-policy distillation.

    Attributes:
        teacher: teacher: checkpoint directory or hub name, with the student's tokens
    """

    teacher: str | None = None
    algorithm: DistilConfig = field(default_factory=DistilConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def check_models(self, model_path: str) -> None:
        """Raises `InvalidConfig` without a teacher, or if the teacher reads other tokens or images than the student."""
        super().check_models(model_path)
        if self.teacher is None:
            raise InvalidConfig("distillation needs a teacher: give --teacher CHECKPOINT, such as one of grpo")
        from rollout.prompts import PromptBuilder
        from workers.training.loading import checkpoint_family

        checkpoint_family(self.teacher)
        student, teacher = (
            PromptBuilder.from_pretrained(path, self.data.max_prompt_length) for path in (model_path, self.teacher)
        )
        if found := differences(student, teacher):
            raise InvalidConfig(
                f"the teacher {self.teacher} cannot score what {model_path} samples: {'; '.join(found)}"
            )

    def reference(self, actor: "ActorConfig") -> "PolicyConfig":
        """The teacher, computed in the layout and the dtype of the student, at the same temperature."""
        return replace(actor.frozen(), model_path=str(self.teacher))


def differences(student: "PromptBuilder", teacher: "PromptBuilder") -> list[str]:
    """How the tokens and images that two checkpoints read differ; empty if one can score the rows of the other."""
    found = []
    ours, theirs = (builder.tokenizer.get_vocab() for builder in (student, teacher))
    if ours != theirs:
        other = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        found.append(
            f"their tokenizers differ ({len(ours)} and {len(theirs)} tokens; {len(other)} have another id or none, such as "
            f"{other[0]!r})"
        )
    if _media(student) != _media(teacher):
        kinds = [builder.family.model_type for builder in (student, teacher)]
        found.append(f"they read images or positions in other forms (model types {kinds[0]} and {kinds[1]})")
    return found


def _media(builder: "PromptBuilder") -> tuple[object, ...]:
    """Everything about media that rows depend on."""
    family, config = builder.family, builder.config
    processor = None if builder.image_processor is None else builder.image_processor.to_dict()
    forms = family.media_layout, family.merge_size(config), family.image_text
    positions = family.mrope, family.videos_by_frame, type(family).video_pieces
    return *forms, *positions, family.media_tokens(config), family.banned_ids(config), processor


# What a model of under a million parameters learns from a trained one within minutes on two cores.
TINY = DistilRunConfig(
    preset="tiny",
    data=DataConfig(batch_size=64, max_prompt_length=256, max_response_length=24, instruction=""),
    optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=100, eval_every=20, save_every=50, output_dir=OUTPUT_DIR),
)
PRESETS = {"tiny": TINY, "any": DistilRunConfig()}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto distil")
