"""GRPO (DeepSeekMath, arXiv:2402.03300) and its relatives without a critic: ``dataproto grpo``.

With no arguments it draws problems, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on prompts with images.
"""

from dataclasses import dataclass, field
from functools import partial

from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs.shared.policy_gradient_config import SIZES, DataConfig, PolicyGradientConfig, parse_with_defaults
from recipes.configs.shared.rollout_options import AgentsConfig
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig


@dataclass(frozen=True)
class GRPOConfig(AlgorithmConfig):
    """The algorithm's settings; verl's defaults where they exist."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs_critic:
            raise InvalidConfig(f"algorithm.advantage={self.advantage} needs the values of a critic: run dataproto ppo")
        if self.advantage == "reverse_kl":
            raise InvalidConfig("algorithm.advantage=reverse_kl needs a teacher: run dataproto distil")


@dataclass(frozen=True)
class GRPORunConfig(PolicyGradientConfig):
    """A run of GRPO.

    Attributes:
        agent: agent whose episodes are the responses: FILE.py:NAME of a function, or a command such as "python my_agent.py"
    """

    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    agent: str | None = None
    agents: AgentsConfig = field(default_factory=AgentsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent is None:
            return
        if self.algorithm.needs_greedy:
            raise InvalidConfig(
                f"--agent makes several rows of an episode, but {self.algorithm.advantage} needs one: choose another advantage"
            )
        if self.engine == "vllm" and self.agents.tokens is None:
            raise InvalidConfig("engine=vllm reserves room for the longest episode: set agents.tokens (--config FILE)")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        no_agent = (self.agent is None, "agents.", "there is no agent: add --agent FILE.py:NAME")
        return [*super().idle_options(), no_agent]

    @property
    def played_agent(self) -> tuple[str, AgentsConfig] | None:
        return None if self.agent is None else (self.agent, self.agents)

    @property
    def longest_response(self) -> int:
        """The largest number of tokens after a prompt."""
        most = super().longest_response
        return most if self.agent is None else self.agents.tokens or self.agents.turns * most


# What a model of under a million parameters learns from synthetic problems within minutes on two cores.
TINY = GRPORunConfig(
    preset="tiny",
    data=DataConfig(batch_size=16, max_prompt_length=256, max_response_length=24, instruction=""),
    algorithm=GRPOConfig(n=16, minibatch=8, kl_coef=0.1),  # two optimizer steps a batch, so that clipping works
    optimizer=OptimizerConfig(lr=5e-4, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=500, eval_every=50, save_every=100),
)
PRESETS = {"tiny": TINY, "any": GRPORunConfig()} | {
    size: GRPORunConfig(preset=size, algorithm=GRPOConfig(minibatch=128, kl_coef=0.01), **options)
    for size, options in SIZES.items()
}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto grpo")
