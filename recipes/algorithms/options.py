"""The options that all policy-gradient recipes share, and the loss and the advantages that they select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from dataproto.errors import InvalidColumn, InvalidConfig, check_at_least
from recipes.algorithms.correction import Correction, Rejection, check_bounds, check_limit
from recipes.algorithms.function_files import in_users_function
from recipes.algorithms.registry import (
    ADVANTAGES,
    GREEDY,
    LOSSES,
    VERL,
    Estimator,
    arguments_by_name,
    paper_options,
    takes,
)
from rollout.engine import SamplingParams
from workers.model.model_config import AggregationMode

if TYPE_CHECKING:
    from torch import Tensor

    from dataproto import DataProto
    from workers.model.packed_model import Outputs

OF_THE_PAPER: Any = None
"""The default of an option that gets the value that the papers of the loss and the advantage use, unless it is given."""
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "opo", "gigpo")
"""Advantages that depend on the samples of the same prompt only."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Sampling, loss and advantages; the defaults are verl's where verl has the option. See docs/algorithms.md.

    Options that are left out get the values that the papers of ``loss`` and ``advantage`` use.

    Attributes:
        n: samples of each prompt
        temperature: temperature of the policy, in sampling and in the loss
        top_p: sample from the smallest set of likeliest tokens with this total probability
        top_k: sample from this number of likeliest tokens; 0: from all
        minibatch: prompts of each optimizer step; None, or more than a batch has: the whole batch
        epochs: passes over each batch
        advantage: baseline of a response or of its tokens: grpo, dr_grpo, rloo, reinforce_plus_plus,
            reinforce_plus_plus_baseline, remax, opo, over turns gigpo and turn_returns, in distil reverse_kl, with a
            critic gae, turn_gae and bi_level_gae, or FILE.py:FUNCTION; default: the loss's, or grpo
        gamma: discount of rewards for each token, for reinforce_plus_plus, gae and bi_level_gae
        loss: loss of log-probs and advantages: ppo, grpo, dr_grpo, dapo, gspo, cispo, sapo, clip_cov, kl_cov or
            FILE.py:FUNCTION; a name also sets the other options of its paper, unless they are given
        clip: distances below and above 1 at which the ratio is clipped; default: the loss's, or 0.2 0.2
        dual_clip: bound of the ratio where the advantage is negative, for ppo, grpo, dr_grpo and dapo
        kl_coef: weight of the KL term to the reference; 0 needs no reference; default: the loss's or the advantage's, or
            0
        kl_in: where the KL term is added; default: as for kl_coef, or loss
        kl: estimator of the KL term; default: as for kl_coef, or k3 in the loss, k1 in the reward
        entropy_coef: weight of the entropy bonus
        aggregation: how the losses of tokens are averaged; default: the loss's or the advantage's, or token-mean
        dynamic_sampling: drop groups whose samples are all equally good, by acc if the reward gives it, else by score, and
            sample others, in at most this number of generations for each step; 0: keep all groups; default: the loss's, or 0
        overlong_buffer: length of the interval below the maximum length in which responses are penalised, in tokens or,
            below 1, as a share of the maximum length (of a turn, in episodes); 0: no penalty; default: the loss's, or 0
        correction: weigh tokens or responses by the importance ratio of actor to engine
        correction_limit: largest importance weight; or a lower and an upper bound, outside of which the weight is 0
        rejection: remove tokens or responses from the loss whose ratio of actor to engine is outside of the bounds
        rejection_bounds: smallest and largest ratio that rejection keeps
        skip_old_log_probs: use the engine's log-probs as the actor's old log-probs: valid if the actor has not changed
            and the two agree

    >>> AlgorithmConfig(loss="gspo").aggregation, AlgorithmConfig(loss="gspo").clip
    ('seq-mean-token-mean', (0.0003, 0.0004))
    >>> AlgorithmConfig(loss="gspo", aggregation="token-mean").aggregation
    'token-mean'
    """

    n: int = 5
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    minibatch: int | None = None
    epochs: int = 1
    advantage: str = OF_THE_PAPER
    gamma: float = 1.0
    loss: str = "ppo"
    clip: tuple[float, float] = OF_THE_PAPER
    dual_clip: float | None = 3.0
    kl_coef: float = OF_THE_PAPER
    kl_in: Literal["loss", "reward"] = OF_THE_PAPER
    kl: Estimator = OF_THE_PAPER
    entropy_coef: float = 0.0
    aggregation: AggregationMode = OF_THE_PAPER
    dynamic_sampling: int = OF_THE_PAPER
    overlong_buffer: float = OF_THE_PAPER
    correction: Correction = "none"
    correction_limit: float | tuple[float, float] = 2.0
    rejection: Rejection = "none"
    rejection_bounds: tuple[float, float] = (0.5, 2.0)
    skip_old_log_probs: bool = False

    def __post_init__(self) -> None:
        given = {name: value for name in VERL if (value := getattr(self, name)) is not None}
        for name, value in paper_options(self.loss, given).items():
            object.__setattr__(self, name, value)
        self.sampling(max_tokens=1, seed=0)  # raises for invalid sampling options
        check_at_least(0, self, "entropy_coef", "overlong_buffer", "kl_coef", group="algorithm.")
        check_at_least(1, self, "epochs", "minibatch", group="algorithm.")
        check_limit(self.correction_limit)
        check_bounds(self.rejection_bounds)
        for problem in (*self._out_of_range(), *self._in_conflict()):
            raise InvalidConfig(f"algorithm.{problem}")

    def _out_of_range(self) -> Iterator[str]:
        """What is wrong with values that are impossible."""
        if self.temperature <= 0:
            yield f"temperature={self.temperature}: must be above 0, for random samples"
        if self.overlong_buffer > 1 and self.overlong_buffer % 1:
            yield f"overlong_buffer={self.overlong_buffer}: must be a whole number of tokens, or a share below 1"
        if self.dynamic_sampling < 0 or self.dynamic_sampling == 1:
            yield f"dynamic_sampling={self.dynamic_sampling}: must be at least 2 generations, or 0 to keep all groups"
        if not 0 <= self.gamma <= 1:
            yield f"gamma={self.gamma}: must be from 0 to 1"
        if min(self.clip) < 0:
            yield f"clip={self.clip} must not be negative"
        if self.dual_clip is not None and self.dual_clip <= 1:
            yield f"dual_clip={self.dual_clip} must be above 1"
        choices = {"kl": get_args(Estimator), "correction": get_args(Correction), "rejection": get_args(Rejection)}
        for name, names in choices.items():
            if getattr(self, name) not in names:
                yield f"{name}={getattr(self, name)!r}: choose one of {', '.join(names)}"

    def _in_conflict(self) -> Iterator[str]:
        """What is wrong with values that do not go together."""
        advantage, loss = ADVANTAGES.find(self.advantage), LOSSES.find(self.loss)
        if self.n < 2 and not advantage.critic and advantage.takes("uid"):  # a critic needs no other samples
            yield f"n={self.n}: {self.advantage} compares the samples of a prompt and needs at least 2"
        if self.n < 2 and self.dynamic_sampling:
            yield f"n={self.n}: dynamic sampling needs groups of at least 2"
        if self.gamma != 1 and not advantage.takes("gamma"):
            others = "reinforce_plus_plus, gae and bi_level_gae have one"
            yield f"gamma={self.gamma}: {self.advantage} has no discount for each token; {others}"
        for option, default in {"clip": VERL["clip"], "dual_clip": AlgorithmConfig.dual_clip}.items():
            value = getattr(self, option)
            if value not in (None, default) and not loss.takes(option):
                others = ", ".join(each for each in LOSSES.names if LOSSES.find(each).takes(option))
                yield f"{option}={value}: {self.loss} does not have this option; it is for {others}"
        if self.kl_in == "loss" and self.kl == "k1":
            yield "kl=k1 has no gradient in expectation: choose k2, k3 or k3+, or set kl_in=reward"
        if self.skip_old_log_probs and self.compares_engine:
            compared = f"correction={self.correction}, rejection={self.rejection} compare the actor's old log-probs"
            yield f"{compared} with the engine's, which skip_old_log_probs assumes to be equal: choose one of them"

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (not self.kl_coef, "kl kl-in", "there is no KL term: add --algorithm.kl-coef"),
            (self.advantage == "reverse_kl", "overlong-buffer", "distillation learns from no rewards: leave it out"),
            (self.correction == "none", "correction-limit", "nothing is corrected: add --algorithm.correction"),
            (self.rejection == "none", "rejection-bounds", "nothing is rejected: add --algorithm.rejection"),
        ]

    def replaced(self, **options: Any) -> Self:
        """The same algorithm with other options.

        What papers set is set anew. A loss or an advantage that is named also replaces the KL term, and an advantage the
        discount.
        """
        named = {name for name in ("loss", "advantage") if options.get(name) is not None}
        anew = [*self.of_the_paper, *(["kl_coef", "kl_in"] if named else [])]
        discount = {"gamma": 1.0} if "advantage" in named else {}
        return replace(self, **dict.fromkeys(anew, OF_THE_PAPER) | discount | options)

    @property
    def of_the_paper(self) -> list[str]:
        """The options that have the values of the papers of ``loss`` and ``advantage``."""
        papers = paper_options(self.loss, {"advantage": self.advantage, "kl_in": self.kl_in})
        papers["kl_in"] = paper_options(self.loss, {"advantage": self.advantage})["kl_in"]
        papers["advantage"] = paper_options(self.loss, {})["advantage"]
        return [name for name, value in papers.items() if getattr(self, name) == value]

    @property
    def compares_engine(self) -> bool:
        """Whether the actor's log-probs before the update are compared with the engine's log-probs."""
        return self.correction != "none" or self.rejection != "none"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the rewards have a KL penalty."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def scores_first_update(self) -> bool:
        """Whether the first optimizer step of a batch, which meets the policy that sampled, computes its old log-probs itself.

        All other rows need a pass of the actor before the update.
        """
        loss, advantage = LOSSES.find(self.loss), ADVANTAGES.find(self.advantage)
        read = advantage.takes("old_log_probs") or any(takes(each, "old_log_probs") for each in loss.columns.values())
        return not (read or self.epochs > 1 or self.kl_in_reward or self.compares_engine)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term or the advantage reads the log-probs of a reference."""
        return self.kl_coef > 0 or ADVANTAGES.find(self.advantage).takes("ref_log_prob")

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage needs the values of a critic."""
        return ADVANTAGES.find(self.advantage).critic

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage needs the score of the greedy response to each prompt."""
        return ADVANTAGES.find(self.advantage).takes(GREEDY)

    def needs_whole_batch(self, prompts: int) -> bool:
        """Whether the update with a batch of ``prompts`` prompts, or what a group adds to it, depends on other groups."""
        return (
            self.updates(prompts) > 1
            or self.advantage not in GROUP_ADVANTAGES
            or bool(LOSSES.find(self.loss).columns)  # of tokens that are chosen from the whole batch
        )

    def overlong_tokens(self, max_tokens: int) -> int:
        """Length of the interval below ``max_tokens`` in which responses are penalised, in tokens."""
        buffer = self.overlong_buffer
        return max(round(buffer * max_tokens), 1) if 0 < buffer < 1 else int(buffer)

    def updates(self, prompts: int) -> int:
        """Number of optimizer steps for a batch of ``prompts`` prompts."""
        return self.epochs * -(-prompts // (self.minibatch or prompts))

    def sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        """The sampling parameters of these options."""
        return SamplingParams(self.n, self.temperature, self.top_p, self.top_k, max_tokens, seed=seed)


def advantage_columns(config: AlgorithmConfig, data: DataProto) -> dict[str, Tensor]:
    """The column ``advantages`` (B, R) from the columns of a batch, and with a critic ``returns`` (B, R), which it learns.

    Raises:
        InvalidConfig: the advantage function has an argument that is neither a column nor an option, or needs a critic.
        InvalidColumn: it returned another shape.
    """
    named, options = ADVANTAGES.find(config.advantage), vars(config)
    what = f"algorithm.advantage={config.advantage}"
    if named.critic and "values" not in data:
        raise InvalidConfig(f"{what} needs the values of a critic")
    given = arguments_by_name(what, named.function, _columns(data), options)
    with in_users_function(what, named.function):
        found = named.function(**given)
    if named.critic:
        from recipes.algorithms.advantages import whiten

        advantages, returns = found
        whitened = whiten(advantages, data["response_mask"]) if options.get("whiten") else advantages
        return {"advantages": whitened, "returns": returns}
    check_shape(what, found, data["response_mask"])
    return {"advantages": found}


def add_loss_columns(config: AlgorithmConfig, data: DataProto, seed: tuple[int, int]) -> None:
    """Adds the columns that the loss reads and that depend on the whole batch; random ones are drawn with ``seed``."""
    for name, function in LOSSES.find(config.loss).columns.items():
        data[name] = function(**arguments_by_name(name, function, _columns(data), vars(config) | {"seed": seed}))


@dataclass(frozen=True)
class NamedLoss:
    """The function that ``config.loss`` names, and the options that it may take.

    All names are looked up by `find`, so that the processes that compute the loss need not know what users have registered.
    """

    name: str
    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    options: Mapping[str, Any]

    @classmethod
    def find(cls, config: AlgorithmConfig) -> NamedLoss:
        return cls(f"algorithm.loss={config.loss}", LOSSES.find(config.loss).function, vars(config))

    def arguments(self, outputs: Outputs, data: DataProto) -> dict[str, Any]:
        """What the function takes of the columns, the options, and ``log_probs`` and ``entropy`` of the update.

        Without ``old_log_probs``, or where all of a row are NaN, the policy has not changed since it sampled: its log-probs are
        the old ones.
        """
        columns, own = _columns(data), outputs.log_probs.detach()
        old = columns.get("old_log_probs", own)
        columns["old_log_probs"] = own.where(old.isnan().all(1, keepdim=True), old)
        columns |= {"log_probs": outputs.log_probs, "entropy": outputs.entropy}
        return arguments_by_name(self.name, self.function, columns, self.options)

    def check(self, outputs: Outputs, *results: object) -> None:
        """Raises `InvalidColumn` unless the loss and each metric are ``(B, R)``."""
        for each in results:
            check_shape(self.name, each, outputs.log_probs)


def _columns(data: DataProto) -> dict[str, Any]:
    return {name: data[name] for name in data.names()}


def check_shape(what: str, found: object, like: Tensor, each: str = "token") -> None:
    """Raises `InvalidColumn` unless ``found``, which ``what`` returned, has the shape of ``like``: one number for ``each``."""
    from torch import Tensor

    if not isinstance(found, Tensor) or found.shape != like.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InvalidColumn(f"{what} returned {shape}, but must return one number for each {each} {tuple(like.shape)}")
