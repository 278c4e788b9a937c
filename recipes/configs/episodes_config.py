"""The options of training over episodes, for any environment."""

from dataclasses import dataclass, field
from pathlib import Path

from dataproto.errors import InvalidConfig, check_at_least
from recipes.configs.ppo_config import ActorCriticRunConfig
from recipes.configs.shared.rollout_options import EpisodeOptions
from recipes.configs.shared.run_config import RunConfig


@dataclass(frozen=True)
class EpisodesConfig(EpisodeOptions):
    """Episodes: where they take place and how long they may be. ``data.max_response_length`` is the limit of one turn.

    Attributes:
        environment: FILE.py:NAME of a class or function that makes an environment; default: the recipe's own
        agent: agent in place of an environment: FILE.py:NAME of a function, or a command such as "python my_agent.py"
        turns: turns of an episode
        tokens: tokens of an episode after its prompt, observations included; default: no limit
        seconds: seconds that the environment of an episode may take in all its calls, without the time of decoding
        last_pictures: number of last observations' pictures that a turn sees; default: all
        memory_gib: memory of the environment, in a process of its own, or of an agent's processes; default: a thread, no limit
        drop_cut: learn nothing from episodes that a limit cut: turns, tokens, time, or a turn's length
    """

    environment: str | None = None
    agent: str | None = None
    last_pictures: int | None = None


@dataclass(frozen=True)
class WarmUpPhaseConfig:
    """The supervised phase on demonstrations, before the small model plays its first episode.

    Attributes:
        steps: updates of the supervised phase
        batch_size: demonstrations of an update
        lr: learning rate of the supervised phase
    """

    steps: int = 30
    batch_size: int = 32
    lr: float = 2e-3

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "batch_size", group="warm_up.")
        check_at_least(0, self, "lr", group="warm_up.")


@dataclass(frozen=True)
class EpisodeRunConfig(ActorCriticRunConfig):
    """A run of GRPO or PPO over episodes. A critic learns too if the advantage needs one: gae, turn_gae or bi_level_gae.

    Attributes:
        warm_up: of the small model
    """

    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    warm_up: WarmUpPhaseConfig = field(default_factory=WarmUpPhaseConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=Path("outputs/episodes")))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is not None:
            raise InvalidConfig(f"reward={self.reward}: the rewards of episodes come from their environment")
        named = self.episodes.environment or self.episodes.agent
        if self.episodes.environment and self.episodes.agent:
            raise InvalidConfig("--environment and --agent: an episode has one of them")
        if (named is None and self.data.data_path) or (self.episodes.environment and self.data.data_path is None):
            raise InvalidConfig(
                "--environment and --data-path go together: the recipe's environment has rows of its own"
            )
        if self.data.data_path is not None and self.model_path is None:
            raise InvalidConfig("--data-path needs --model-path: the small model knows only the words of this recipe")
        if self.run.epochs is not None:
            raise InvalidConfig("epochs: the length of a run over episodes is --steps")
        shows_few = self.episodes.last_pictures is not None
        if self.episodes.agent is not None and shows_few:
            raise InvalidConfig("--last-pictures: an agent keeps its own history, so it leaves out pictures itself")
        several = "--agent" if self.episodes.agent else "--last-pictures" if shows_few else None
        if several and self.algorithm.needs_greedy:
            raise InvalidConfig(
                f"{several} makes several rows of an episode, remax needs one: choose another advantage"
            )
        if self.engine == "vllm" and self.episodes.tokens is None:
            raise InvalidConfig("engine=vllm needs --tokens: it reserves room for the longest episode")

    def _needs_own_prompts(self) -> list[str]:
        few = "--last-pictures makes several rows of an episode, but one that continues later has one"
        return [*super()._needs_own_prompts(), *([few] if self.episodes.last_pictures is not None else [])]

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            *super().idle_options(),
            (
                self.critic is None,
                "critic-optimizer. algorithm.lam algorithm.whiten algorithm.critic-epochs algorithm.critic-warmup "
                "algorithm.value-clip",
                "there is no critic: add --algorithm.advantage gae, or over turns turn_gae or bi_level_gae",
            ),
            (True, "ray.reward-processes ray.reward-timeout-s", "environments give the rewards: leave it out"),
            (True, "level", "environments make no problems of a level: leave it out"),
            (
                " " not in (self.episodes.agent or ""),
                "processes",
                "only a command of --agent has processes: leave it out",
            ),
            (not self.data.data_path, "instruction", "only rows of your own have it: add --data-path"),
            (self.model_path is not None, "warm-up.", "only the small model has this phase: leave out --model-path"),
        ]

    @property
    def longest_response(self) -> int:
        """The largest number of tokens after a prompt."""
        if self.episodes.tokens is not None:
            return self.episodes.tokens
        return self.episodes.turns * self.data.max_response_length
