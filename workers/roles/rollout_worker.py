"""The role that turns prompts into responses."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from dataproto import DataProto
from dataproto.columns import ROUTED_EXPERTS
from dataproto.errors import DataProtoError, InvalidConfig, end_after
from dataproto.vlm import VLMFamily
from rollout.agents import Agent, AgentPlan
from rollout.continuation import BEGUN, BegunTurn, Tokens, WholeGroups, decode_groups
from rollout.engine import RequestEngine, SamplingParams, create_engine, engine_ranks, has_option
from rollout.engine_ranks import drive
from rollout.environments import EpisodeLimits, EpisodePlan, MakeEnvironment, TurnRenderer
from rollout.environments.episode_rows import episode_columns, episode_starts
from rollout.environments.held_episodes import Decoding, HeldEpisodes, Plan
from rollout.prompts import PromptBuilder
from rollout.responses import OCCURRENCE, attach_responses, build_requests, number_occurrences, prompt_names
from workers.model.model_config import ModelConfig
from workers.ranks.dispatch_modes import Arguments, dispatch, join_rows, split_rows
from workers.ranks.mesh import Ranks
from workers.roles import carried_groups
from workers.roles.carried_groups import GROUP
from workers.roles.sharding_manager import ShardingManager, engine_group, neighbours
from workers.training.loading import checkpoint_family

HOLDER = "_holder"
"""The column with the dp position that holds a row's prompt."""
PLACE = "_place"
"""The column with the place of the episode that a row is of."""
NO_LIMIT = 1 << 30
"""Tokens of an episode's prompt; the engine has limits of its own."""


Stream = Callable[[torch.dtype], Iterable[tuple[str, Tensor]]]
"""Returns (name, tensor) pairs in a dtype."""


@dataclass(frozen=True)
class LoraStreams:
    """What an actor with adapters hands over: the weights without them, and the adapters."""

    actor: ModelConfig
    base: Stream
    adapter: Stream


def lora_streams(config: ModelConfig, base: Stream, adapter: Stream) -> LoraStreams | None:
    """``None`` for an actor without adapters."""
    return LoraStreams(config, base, adapter) if config.lora_rank else None


@dataclass(frozen=True)
class RolloutConfig:
    """Which engine generates, and its own options."""

    model_path: str
    engine: str = "hf"
    options: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)  # of the `PromptBuilder` of episodes, such as max_pixels
    replay_routing: bool = True
    """The actor uses the experts that the engine chose, if the engine can tell (arXiv:2510.11370)."""


def why_merged(config: RolloutConfig, actor: ModelConfig, family: VLMFamily) -> str | None:
    """Why the engine cannot hold an actor's adapters, so that they are merged into the weights; ``None`` if it can."""
    if not has_option(config.engine, "lora_rank"):
        return "it has no option lora_rank"
    if config.options.get("lora_rank") == 0:
        return "its option lora_rank is 0"
    if actor.lora_vision:
        return "the vision tower has some (lora_vision)"
    if family.experts is not None:
        return "experts have some"
    if family.part:
        return f"the model is the {family.part} of a larger one"
    return None


def replays_routing(config: RolloutConfig, family: VLMFamily) -> bool:
    """Whether responses come with the experts of their tokens, which the actor then uses."""
    return config.replay_routing and family.experts is not None and has_option(config.engine, "routed_experts")


def split_prompts(call: Arguments, parts: int) -> list[Arguments]:
    """As `split_rows`; rows of one uid are numbered before they are split."""
    (numbered,) = call.with_first("prompts", [number_occurrences(call.first("prompts"))])
    return split_rows(numbered, parts)


class RolloutWorker:
    """Generates with an engine whose weights follow the actor's."""

    def __init__(
        self,
        config: RolloutConfig,
        weights: Stream,
        ranks: Ranks | None = None,
        shares_device: bool = True,
        lora: LoraStreams | None = None,
    ) -> None:
        """``weights`` returns the actor's (name, tensor) pairs; it is called, with the engine's dtype, after each change of them.

        Of an actor with adapters (``lora``) the engine gets the base once and then only adapters, if it can hold them; see
        `why_merged`.

        ``ranks`` is this process's place in the training layout, which splits and joins the rows; the engine's option
        ``tensor_parallel`` is independent of it. ``shares_device``: whether other roles need the engine's memory between
        rollouts.

        Raises:
            InvalidConfig: the engine does not fit the layout.
        """
        self.config = config
        self.ranks = ranks = ranks or Ranks()
        tensor_parallel = engine_ranks(config.options, ranks.layout.world_size)
        block, self.engine_group = neighbours(ranks, tensor_parallel), engine_group(ranks, tensor_parallel)
        self.family = checkpoint_family(config.model_path)
        awaits = has_option(config.engine, "awaits_weights")
        options: dict[str, Any] = {"awaits_weights": True} if awaits else {}  # the actor's
        if replays_routing(config, self.family):
            options["routed_experts"] = True
        self.lora_line, merged = "", None
        if lora is not None:
            merged = why_merged(config, lora.actor, self.family)
            options |= {} if merged else {"lora_rank": lora.actor.lora_rank}
            how = (
                f"the adapters merged into all weights at each change: {merged}"
                if merged
                else "the base once, then adapters"
            )
            self.lora_line = f"the engine {config.engine} gets {how}"
        options |= config.options
        self.replays = bool(options.get("routed_experts"))
        self.engine = create_engine(config.engine, config.model_path, **options)
        if self.replays and getattr(self.engine, "no_experts", None) is None:
            raise InvalidConfig(
                f"the engine {config.engine!r} has the option routed_experts, but no attribute no_experts (0, layers, choices): "
                "give it one, or turn routing replay off (--rollout.no-replay-routing)"
            )
        first, adapter = (
            (weights, None) if lora is None or merged else (lora.base, partial(lora.adapter, self.engine.dtype))
        )
        self.sharding = ShardingManager(
            self.engine, partial(first, self.engine.dtype), block, shares_device, ranks, adapter
        )
        self._calls = 0
        self._held: defaultdict[type, HeldEpisodes] = defaultdict(HeldEpisodes)  # by the type of their plan
        tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(tokenizer.eos_token_id if pad is None else pad)

    @dispatch(split=split_prompts, join=join_rows)
    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """``sampling.n`` rows for each prompt row, next to each other, with prompt and response columns.

        A sample's random stream derives from ``sampling.seed``, the row's ``uid`` and the number among the samples of that uid:
        ``prompts.repeat(4)`` with ``n=1`` gives what ``prompts`` gives with ``n=4``, and the same prompts with the same seed
        give the same samples again. Rows without uids use other streams in every call, counted from the worker's start.
        """
        self._calls += 1
        with self.sharding as sharding:
            with self.ranks.fail_together():  # else other engines would wait for one that refuses a row
                shared = sharding.preprocess_data(self._numbered(prompts))
                completions = list(self.engine.generate(build_requests(shared, sampling, self._calls), sampling))
                rollouts = attach_responses(shared, completions, sampling, self.family, self.pad_token_id)
                if self.replays and len(rollouts) and ROUTED_EXPERTS not in rollouts:
                    raise InvalidConfig(
                        f"the engine {self.config.engine!r} has named no experts of its responses, which routing replay needs: "
                        "turn it off (--rollout.no-replay-routing)"
                    )
            return self._own_rows(rollouts, OCCURRENCE)

    @dispatch(split=split_prompts, join=join_rows)
    def play(
        self, prompts: DataProto, make_environment: MakeEnvironment, sampling: SamplingParams, limits: EpisodeLimits
    ) -> DataProto:
        """``sampling.n`` episodes for each prompt row, next to each other, one row each, with the columns of `episode_columns`.

        With ``limits.last_pictures`` an episode continues in a new row of its ``trajectory`` whenever pictures are left out.

        Streams are those of `generate`, with one of its own for each later turn. If an engine has several ranks, environments run
        on its first one. An environment that fails ends its episode, with
        the reason in ``end_reason``, and nothing is learned from it.

        Args:
            prompts: with ``raw_prompt``, the messages that the environment's first observation follows.
            make_environment: makes the environment of an episode in this process.
            sampling: of each turn; ``max_tokens`` limits a turn.
            limits: how long an episode may be.

        Raises:
            InvalidConfig: the chat template cannot show observations, or ``sampling`` asks for further log-probs.
        """
        return self.episodes(prompts, EpisodePlan(make_environment, limits), sampling)

    @dispatch(split=split_prompts, join=join_rows)
    def run(self, prompts: DataProto, agent: Agent, sampling: SamplingParams, limits: EpisodeLimits) -> DataProto:
        """``sampling.n`` episodes of an agent for each prompt row, next to each other, with the columns of `play` and those of
        `rollout.agents.agent_columns`.

        An agent is a function of an `rollout.agents.AgentTask` that talks to the policy through any client of OpenAI's or
        Anthropic's API, and returns the reward. Each episode is a row, or several where its requests do not continue each
        other. An agent that fails ends its episode, see `play`.

        Args:
            prompts: with ``raw_prompt``, the messages of the task.
            sampling: of each turn; ``max_tokens`` limits a turn.
            limits: how long an episode may be; the time is that of the agent between its requests.

        Raises:
            MissingPackage: the extra ``agents`` is not installed.
        """
        return self.episodes(prompts, AgentPlan(agent, limits), sampling)

    @dispatch(split=split_prompts, join=join_rows)
    def episodes(self, prompts: DataProto, plan: Plan, sampling: SamplingParams) -> DataProto:
        """Those of `play` or `run`, as the plan says."""
        sampling.check_sampled_alone("episodes")
        self._calls += 1
        with self.sharding as sharding:
            with self.ranks.fail_together():
                numbered = self._numbered(prompts)[:]
                numbered[HOLDER] = np.full(len(prompts), self.ranks.rank("dp"))
                shared = sharding.preprocess_data(numbered)
                starts = episode_starts(shared, sampling, self._calls)

                def played(engine: RequestEngine) -> list[Any]:
                    return plan.play(engine, self.renderer, starts, sampling, sharding.version)

                episodes = drive(self.engine, self.engine_group, played)
                repeated = shared.repeat(sampling.n, interleave=True)
                most = plan.limits.most_tokens(sampling.max_tokens)
                rollouts = episode_columns(repeated, episodes, self.renderer, most, self._no_experts)
                plan.add_columns(rollouts, episodes)
            return self._own_rows(rollouts, OCCURRENCE, HOLDER)

    @dispatch(split=carried_groups.split_groups, join=carried_groups.join_in_order)
    def advance(
        self,
        samples: DataProto,
        sampling: SamplingParams,
        wanted: int,
        weight_version: int,
        due: Collection[str] = (),
        plan: Plan | None = None,
    ) -> DataProto:
        """Decodes samples until ``wanted`` groups are whole: all of their samples have finished. The others can continue later.

        Each data-parallel rank decodes until its share of the groups is whole. Streams are those of `generate` and `play`.

        Args:
            samples: a row for each sample, with the columns of its prompt, ``uid``, `OCCURRENCE` (the number of the sample), and
                `BEGUN`, what an earlier call returned.
            weight_version: written next to each token that is sampled now.
            due: uids of groups that have to be whole.
            plan: of episodes; without it each sample is a response.

        Returns:
            A row for each sample, or several of an episode, with `FINISHED`. Rows that have finished are those of `generate`,
            `play` or `run`, with ``weight_version (B, R)``; of the others only `BEGUN` has a meaning. If the engine fails at a
            sample or refuses it, its rank decodes no further, keeps what has begun, and tells the error in `FAILED`.
        """
        sampling.check_sampled_alone("samples that continue later")
        if plan is not None and plan.limits.last_pictures is not None:
            raise InvalidConfig(
                f"last_pictures={plan.limits.last_pictures} makes several rows of an episode; one that continues later has one "
                "row"
            )
        if GROUP not in samples:
            samples = carried_groups.number_groups(samples)
        sampling, samples = replace(sampling, n=1), samples[:]
        samples[HOLDER] = np.full(len(samples), self.ranks.rank("dp"))
        with self.sharding as sharding:
            with self.ranks.fail_together():
                shared = sharding.preprocess_data(samples, together=GROUP)
                groups = WholeGroups([str(uid) for uid in shared["uid"]], carried_groups.share_of(shared, wanted), due)
                if plan is None:
                    rollouts = self._advance_responses(shared, sampling, groups, weight_version)
                else:
                    rollouts = self._advance_episodes(shared, sampling, groups, weight_version, plan)
            return self._own_rows(rollouts, GROUP, HOLDER)

    def _own_rows(self, rollouts: DataProto, *added: str) -> DataProto:
        """This rank's rows of those that the engines generated, without the columns that were added for them."""
        with self.ranks.fail_together():
            own = self.sharding.postprocess_data(rollouts, HOLDER if HOLDER in added else None)
            own.pop(non_tensor_batch_keys=list(added))
            return own

    def _advance_responses(
        self, samples: DataProto, sampling: SamplingParams, groups: WholeGroups, weight_version: int
    ) -> DataProto:
        begun = [BegunTurn.of(turns[0]).tokens if turns else Tokens() for turns in samples[BEGUN]]
        requests = build_requests(samples, sampling)
        found = decode_groups(self.engine, requests, begun, sampling, groups, self.family, weight_version)
        rest = sampling, self.family, self.pad_token_id, self._no_experts
        return carried_groups.response_rows(samples, found, groups.failure, *rest)

    def _advance_episodes(
        self, samples: DataProto, sampling: SamplingParams, groups: WholeGroups, weight_version: int, plan: Plan
    ) -> DataProto:
        starts, begun = episode_starts(samples, sampling), list(samples[BEGUN])
        held = self._held[type(plan)]

        def played(engine: RequestEngine) -> tuple[list[Any], tuple[int, DataProtoError] | None]:
            decoding = Decoding(engine, self.renderer, sampling, groups, weight_version)
            return held.advance(plan, starts, begun, decoding), groups.failure

        episodes, failure = drive(self.engine, self.engine_group, played)
        most = plan.limits.most_tokens(sampling.max_tokens)
        samples[PLACE] = np.arange(len(samples))
        shown = [each if each.ended else type(each)(each.start) for each in episodes]  # or one that has not begun
        data = episode_columns(samples, shown, self.renderer, most, self._no_experts)
        plan.add_columns(data, shown)
        places = data.pop(non_tensor_batch_keys=[PLACE])[PLACE]
        ended = [episodes[place].ended is not None for place in places]
        begun = [[] if done else episodes[place].begun for place, done in zip(places, ended, strict=True)]
        failure = failure and (int(np.argmax(places == failure[0])), failure[1])
        return carried_groups.with_begun(data, ended, begun, failure)

    @cached_property
    def renderer(self) -> TurnRenderer:
        """Renders prompts and observations of episodes."""
        options = {"max_prompt_length": NO_LIMIT} | self.config.prompts
        return TurnRenderer(PromptBuilder.from_pretrained(self.config.model_path, **options))

    @property
    def _no_experts(self) -> Tensor | None:
        """The experts ``(0, M, k)`` of no token, if the actor is to use those that the engine names."""
        return self.engine.no_experts if self.replays else None

    def _numbered(self, prompts: DataProto) -> DataProto:
        """The prompts with the column `OCCURRENCE`, counted over all data-parallel ranks."""
        if OCCURRENCE in prompts:
            return prompts
        everybody = self.ranks.all_gather(prompt_names(prompts), "dp")
        return number_occurrences(prompts, [name for names in everybody[: self.ranks.rank("dp")] for name in names])

    @dispatch("rank_zero")
    def how_lora(self) -> str:
        """How the engine gets the actor's adapters, in one line; empty if the actor has none."""
        return self.lora_line

    @dispatch("rank_zero")
    def wanted_streams(self) -> tuple[str, ...]:
        """The actor's methods whose tensors the engine takes next, in this order."""
        if self.sharding.adapter is None:
            return ("named_weights",)
        return ("adapter_weights",) if self.sharding.has_base else ("base_weights", "adapter_weights")

    @dispatch("rank_zero")
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the engine's weights."""
        return self.engine.dtype

    @dispatch("all")
    def release(self) -> None:
        """Closes the environments of episodes that would continue later, before the process ends."""
        end_after(None, *(held.release for held in self._held.values()))

    @dispatch("all")
    def mark_stale(self) -> None:
        """Marks the engine's weights as stale: the actor's are streamed before the next generation."""
        self.sharding.mark_stale()

    @dispatch("all")
    def refresh(self) -> None:
        """Streams the actor's weights now if they are stale; an actor in other processes has to send them meanwhile."""
        with self.sharding:
            pass
