"""The phases of a step that policy-gradient recipes share. Each takes the step's metrics, and adds its own.

Dimension letters: B rows, R response tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.errors import InvalidConfig
from dataproto.packing import equally_wide
from dataproto.planning import cut_minibatches
from recipes.algorithms.advantages import informative_rows
from recipes.algorithms.correction import importance_weights, kept_tokens
from recipes.algorithms.kl import KL_ESTIMATORS
from recipes.algorithms.mismatch import correction_metrics, difference_metrics
from recipes.algorithms.options import AlgorithmConfig, add_loss_columns, advantage_columns
from recipes.algorithms.penalties import overlong_penalty, penalised_rewards
from recipes.data.curriculum import Curriculum, verdicts
from recipes.run.metrics import timed
from rollout.engine import SamplingParams
from workers import Roles
from workers.roles.reward import place_on_last_token

Metrics = dict[str, float]
Scores: TypeAlias = Callable[[], DataProto]
"""Waits until rows are scored, and returns the columns of their scores."""


@dataclass
class StepState:
    """What goes from step to step, besides the models: the number of steps that are done, and what a curriculum has observed.

    Checkpoints hold both. ``more`` loads further prompts; only dynamic sampling calls it.
    """

    steps: int = 0
    more: Callable[[], DataProto] | None = None
    curriculum: Curriculum | None = None

    def state_dict(self) -> dict[str, Any]:
        own = {"steps": self.steps}
        return own if self.curriculum is None else own | {"curriculum": self.curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state.get("curriculum", {}))


def sample(
    roles: Roles,
    prompts: DataProto,
    config: AlgorithmConfig,
    sampling: SamplingParams,
    state: StepState,
    metrics: Metrics,
) -> tuple[DataProto, Scores]:
    """Samples ``config.n`` responses to each prompt, and begins to score them.

    A reward function in processes of its own scores the rows until their `Scores` are asked for. Dynamic sampling repeats
    this until the samples of every group differ in their score, so its rows have their scores already. The scores of ReMax
    include the column ``reward_baselines (B,)``, the scores of greedy responses. With ``skip_old_log_probs`` the engine's
    log-probs are also the column ``old_log_probs``.

    Raises:
        InvalidConfig: dynamic sampling without ``state.more``.
        Exception: an error of the reward that is known already.
    """
    generations = config.dynamic_sampling
    if not generations:
        return _sample_once(roles, prompts, config, sampling, metrics)
    if state.more is None:
        raise InvalidConfig("dynamic sampling needs further prompts: give the step a StepState with a function `more`")

    def scored(prompts: DataProto) -> DataProto:
        data, scores = _sample_once(roles, prompts, config, sampling, metrics)
        return data | scores()

    data, found = sample_informative_groups(scored, prompts, state.more, generations)
    metrics.update(found)
    return data, DataProto  # there are no further columns


def _sample_once(
    roles: Roles, prompts: DataProto, config: AlgorithmConfig, sampling: SamplingParams, metrics: Metrics
) -> tuple[DataProto, Scores]:
    with timed(metrics, "gen"):
        data: DataProto = roles.rollout.generate(prompts, replace(sampling, n=config.n))
    scores = begin_scores(roles, data, metrics)
    if config.skip_old_log_probs and "old_log_probs" not in data:
        data["old_log_probs"] = data["rollout_log_probs"]
    if not config.needs_greedy:
        return data, scores
    with timed(metrics, "gen"):
        greedy: DataProto = roles.rollout.generate(prompts, replace(sampling, n=1, temperature=0.0))
    greedy_scores = begin_scores(roles, greedy, metrics)

    def with_baselines() -> DataProto:
        columns, found = scores(), greedy_scores()["token_level_rewards"].sum(-1)
        metrics["reward/greedy_baseline"] = float(found.mean())
        return columns | DataProto.from_dict({"reward_baselines": found.repeat_interleave(config.n)})

    return data, with_baselines


def begin_scores(roles: Roles, data: DataProto, metrics: Metrics) -> Scores:
    """Scores the rows; a reward function in processes of its own only begins to."""
    with timed(metrics, "reward"):
        if not roles.scores_apart:
            found = roles.reward.score(data)
            return lambda: found
        coming: Future[DataProto] = roles.reward.submit("score", data)
        if coming.done():
            coming.result()  # raises an error before models work

    def wait() -> DataProto:
        with timed(metrics, "reward"):
            return coming.result()

    return wait


def sample_informative_groups(
    scored: Callable[[DataProto], DataProto], prompts: DataProto, more: Callable[[], DataProto], generations: int
) -> tuple[DataProto, Metrics]:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): one informative group for each of the ``prompts``.

    A group is informative if its samples differ in their score. One whose samples are all equally good (see `verdicts`) is
    dropped, and a whole further batch of prompts is sampled. When the batch is full, groups that are left over are dropped too,
    so that the loader's position is the whole state of a run. After ``generations`` the first dropped groups fill the batch
    (deviation: verl stops the run with an error).

    Args:
        scored: prompts to scored rollout rows; the rows of a group are next to each other.
        more: loads further prompts.

    Returns:
        The rows, and the metrics ``train/num_gen_batches`` (verl's name), ``train/filtered_groups`` (the number of dropped
        groups) and ``train/sampled_score/mean`` (over all sampled rows).
    """
    wanted, kept, dropped, scores = len(prompts), list[DataProto](), list[DataProto](), list[float]()
    for generation in range(1, generations + 1):
        data = scored(prompts)
        informative = informative_rows(verdicts(data), data["uid"])
        kept.append(data[informative])
        dropped.append(data[~informative])
        scores += [float(score) for score in data["score"]]
        if sum(map(count_prompts, kept)) >= wanted or generation == generations:
            break
        prompts = more()
    rows = joined_parts(equally_wide([part for part in (*kept, *dropped) if len(part)]))
    chosen = list(dict.fromkeys(rows["uid"]))[:wanted]
    return rows[np.isin(rows["uid"].astype(str), [str(uid) for uid in chosen])], {
        "train/num_gen_batches": generation,
        "train/filtered_groups": sum(map(count_prompts, dropped)),
        "train/sampled_score/mean": sum(scores) / len(scores),
    }


def joined_parts(parts: Sequence[DataProto]) -> DataProto:
    """The rows of parts that were scored apart. Arrays that a part lacks, such as metrics of a reward, are ``None`` there.

    >>> one, other = (DataProto.from_dict(non_tensors={"score": [1.0], **found}) for found in ({"acc": [1]}, {}))
    >>> joined_parts([one, other])["acc"].tolist()
    [1, None]
    """
    names = {name for part in parts for name in part.non_tensor_batch}
    filled = [part[:] for part in parts]
    for part in filled:
        for name in sorted(names.difference(part.names())):
            part[name] = object_array([None] * len(part))
    return DataProto.concat(filled)


def in_order_of(prompts: DataProto, data: DataProto) -> DataProto:
    """The rows of the prompts' samples, in the order of the prompts."""
    places = {uid: place for place, uid in enumerate(prompts["uid"])}
    return data[np.argsort([places[uid] for uid in data["uid"]], kind="stable")]


def count_prompts(data: DataProto) -> int:
    """The number of prompts that the rows are samples of."""
    return len(set(data["uid"]))


def policy_log_probs(
    roles: Roles, data: DataProto, config: AlgorithmConfig, metrics: Metrics, prompts: int | None = None
) -> DataProto:
    """The columns ``old_log_probs`` and ``ref_log_prob`` ``(B, R)`` that the step reads and ``data`` lacks.

    The first optimizer step meets the policy that sampled, so its loss takes the log-probs of its own pass as the old ones
    (`AlgorithmConfig.scores_first_update`). ``old_log_probs`` is NaN in its rows, and is no column if the update has one step.

    Args:
        prompts: the number of prompts of the step, of which ``data`` is a part; by default those of ``data``.
    """
    columns, rows = DataProto(), np.arange(len(data))
    updates = config.updates(prompts or count_prompts(data))
    if "old_log_probs" not in data and (updates > 1 or not config.scores_first_update):
        if config.scores_first_update and prompts is None:
            rows = np.sort(np.concatenate(cut_minibatches(data["uid"], config.minibatch or len(data))[1:]))
        with timed(metrics, "old_log_prob"):
            found = roles.actor.log_probs(data[rows], into="old_log_probs")["old_log_probs"]
        old = torch.full(data["response_mask"].shape, torch.nan).index_copy(0, torch.from_numpy(rows), found)
        columns = DataProto.from_dict({"old_log_probs": old})
    if config.needs_reference:
        with timed(metrics, "ref"):
            columns |= roles.reference.log_probs(data, into="ref_log_prob")
    return columns


def with_advantages(
    data: DataProto, config: AlgorithmConfig, sampling: SamplingParams, state: StepState, metrics: Metrics
) -> tuple[DataProto, DataProto]:
    """The rows with the rewards of `shape_rewards` and their advantages ``(B, R)``, and the rows of the update."""
    with timed(metrics, "adv"):
        data, shaped = shape_rewards(data, config, sampling.max_tokens)
        data |= DataProto.from_dict(advantage_columns(config, data))
        learned, corrected = rows_to_learn(data, config, seed=(sampling.seed, state.steps))
    metrics.update(shaped | corrected)
    return data, learned


def shape_rewards(data: DataProto, config: AlgorithmConfig, max_tokens: int) -> tuple[DataProto, Metrics]:
    """Subtracts the overlong penalty and the KL penalty from ``token_level_rewards (B, R)``, where they are set.

    The rewards before that become the column ``token_level_scores (B, R)``. Each turn of an episode is a response of its own,
    whose length counts and whose last token gets the penalty.

    Args:
        max_tokens: the longest response, or turn of an episode, in tokens.
    """
    metrics: Metrics = {}
    mask, rewards = data["response_mask"], data["token_level_rewards"]
    buffer = config.overlong_tokens(max_tokens)
    if not buffer and not config.kl_in_reward:
        return data, metrics
    shaped = data[:]
    shaped["token_level_scores"] = rewards
    if buffer:
        penalties = torch.zeros_like(rewards)
        for turn in _turns(data):
            penalties = penalties + place_on_last_token(overlong_penalty(turn, max_tokens, buffer), turn)
        rewards = rewards + penalties
        metrics["reward/overlong_penalty"] = float(penalties.sum(1).mean())
    if config.kl_in_reward:
        kl = KL_ESTIMATORS[config.kl](data["old_log_probs"], data["ref_log_prob"])
        rewards, metrics["actor/reward_kl_penalty"] = penalised_rewards(rewards, kl, mask, config.kl_coef)
        metrics["actor/reward_kl_penalty_coeff"] = config.kl_coef
    shaped["token_level_rewards"] = rewards
    return shaped, metrics


def _turns(data: DataProto) -> list[Tensor]:
    """The sampled tokens ``(B, R)`` of each turn; all of them in rows that are no episodes."""
    mask = data["response_mask"]
    if "turn" not in data:
        return [mask]
    sampled = mask.bool()
    return [sampled & (data["turn"] == number) for number in data["turn"][sampled].unique().tolist()]


def rows_to_learn(data: DataProto, config: AlgorithmConfig, seed: tuple[int, int]) -> tuple[DataProto, Metrics]:
    """The rows of the update, with all columns that the loss reads, corrected for the engine's log-probs if that is set.

    A rejected token has 0 in ``response_mask``, so no denominator counts it; its advantage still entered the statistics of its
    group. A mini-batch with no token left, or whose episodes all failed, is removed, so the result may have no rows. ``data``
    stays as it is.

    Args:
        seed: of the random choices that a loss makes.
    """
    metrics: Metrics = {}
    learned = data[:]
    if config.compares_engine:
        old, engine, mask = data["old_log_probs"], data["rollout_log_probs"], data["response_mask"]
        weights = kept = None
        if config.correction != "none":
            weights = importance_weights(old, engine, mask, config.correction, config.correction_limit)
            learned["rollout_is_weights"] = weights
        if config.rejection != "none":
            kept = kept_tokens(old, engine, mask, config.rejection, config.rejection_bounds)
            learned["response_mask"] = kept
        metrics = correction_metrics(old, engine, mask, weights, kept) | difference_metrics(data, old)
    learned = learned[rows_with_tokens(learned, config.minibatch)]
    add_loss_columns(config, learned, seed)
    return learned, metrics


def rows_with_tokens(data: DataProto, minibatch: int | None) -> np.ndarray:
    """The rows ``(N,)`` int64 without those of mini-batches (of ``minibatch`` prompts each) in which no token is left."""
    rows, names, has_token = np.arange(len(data)), np.asarray(data["uid"]), data["response_mask"].any(1).numpy()
    while len(rows):
        parts = [np.arange(len(rows))] if minibatch is None else cut_minibatches(names[rows], minibatch)
        alive = [part for part in parts if has_token[rows[part]].any()]
        if len(alive) == len(parts):
            break
        rows = rows[np.sort(np.concatenate([*alive, np.zeros(0, dtype=np.int64)]))]
    return rows


def log_probs_before_update(data: DataProto, learned: DataProto, config: AlgorithmConfig, seen: Tensor) -> Metrics:
    """Adds the column ``actor_log_probs (B, R)`` to ``data`` for reports; how far the engine's log-probs are from these.

    They are ``old_log_probs``, where what the update has computed replaces NaN (see `policy_log_probs`). Without that column, or
    if it holds the engine's own, they are those that the update computed of the rows of its first mini-batch, NaN in the others:
    the later mini-batches met a policy that had already learned. (For a batch that an older policy sampled, the distance includes
    the updates since then.) Rows that the update left out have NaN. The distance is left out where `rows_to_learn` has measured
    it.

    Args:
        learned: the rows of the update.
        seen: of these rows ``(N, R)``, the log-probs that the update computed before it changed the policy.
    """
    known, engine = (learned[name] if name in learned else None for name in ("old_log_probs", "rollout_log_probs"))
    places = torch.from_numpy(np.flatnonzero(np.isin(data["uid"].astype(str), learned["uid"].astype(str))))
    rows = np.arange(len(learned))
    if known is not None:
        known = seen.where(known.isnan().all(1, keepdim=True), known)
        data["old_log_probs"] = data["old_log_probs"].index_copy(0, places, known)
    if known is None or (engine is not None and torch.equal(known, engine)):
        known = seen
        if config.minibatch is not None:
            rows = cut_minibatches(learned["uid"], config.minibatch)[0]
    nothing = torch.full(data["response_mask"].shape, torch.nan)
    data["actor_log_probs"] = nothing.index_copy(0, places[rows], known[rows])
    return {} if config.compares_engine or engine is None else difference_metrics(learned[rows], known[rows])


@contextmanager
def whole_update(actor: Any) -> Iterator[None]:
    """The actor keeps nothing of an update in parts that an error ends in here, or that an interrupted step has left."""
    actor.drop_update()
    try:
        yield
    except Exception:
        with suppress(Exception):  # of a group that the error has closed
            actor.drop_update()
        raise
