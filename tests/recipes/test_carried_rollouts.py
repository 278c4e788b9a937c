"""Samples that go on after their step: which groups a step learns from, and that a sample stays the same under equal weights."""

from types import SimpleNamespace

import pytest
import torch

import workers
from dataproto import DataProto
from dataproto.errors import InvalidConfig, RequestFailed, ending
from helpers.carried_runs import (
    BATCH,
    SAMPLING,
    Corridor,
    Group,
    Numbers,
    Run,
    close,
    decode_in_step,
    generated,
    loader_of,
    played,
    reread,
    samples_of,
    talked,
    uninterrupted,
)
from helpers.checkpoints import write_checkpoint
from helpers.episodes import RandomEngine, picture, play_episodes, renderer_of, starts_of
from helpers.option_files import in_files
from recipes.geo3k_grpo import parse
from recipes.grpo import GRPOConfig, grpo_step, grpo_step_in_parts, step_for
from recipes.run import carrying
from recipes.run.carrying import OWNER, CarryingRollout, carry_samples
from recipes.run.episode_roles import Played, with_episodes
from recipes.run.look_ahead import LookAhead
from recipes.run.phases import StepState
from rollout.continuation import WholeGroups
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.environments.episode_loop import EpisodePlan
from rollout.environments.held_episodes import Decoding
from workers.cluster.local import LocalGroup
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import reference_worker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
from workers.training.optimizer import OptimizerConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(path) -> list[LocalGroup]:
    """The rollout roles of two processes."""
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    config = RolloutConfig(path)
    return [LocalGroup(RolloutWorker(config, lambda dtype: actor.named_weights())) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("sample", [generated, played, talked])
def test_samples_that_are_carried_over_are_those_of_an_uninterrupted_run(groups, path, sample, tmp_path, monkeypatch):
    """Also in a new process, where environments are made anew and get the same actions again."""
    monkeypatch.setattr(carrying, "AT_A_TIME", 2.0)
    decode_in_step(monkeypatch)
    run = Run(groups[0], path, bound=3)
    parts = [run.step(sample) for _ in range(2)]
    begun = [turn for turns in run.rollout.samples.unfinished["_begun"] for turn in turns]
    assert any(turn["token_ids"].numel() and not turn["whole"] for turn in begun)
    other = Run(groups[1], path, 3, run.done)
    other.rollout.load_state_dict(reread(run.rollout.state_dict(), tmp_path))
    versions, ends = [data["weight_version"][data["response_mask"].bool()] for data in parts], []
    for goes_on in (run, other):
        later = [goes_on.step(sample) for _ in range(2)]
        versions += [data["weight_version"][data["response_mask"].bool()] for data in later]
        assert all(len(set(data["uid"])) == BATCH and len(data) == BATCH * SAMPLING.n for data in later)
        ends.append(samples_of([*parts, *later]))
    assert len(ends[0]) == 4 * BATCH  # each group once
    expected = uninterrupted(groups[0], path, sample, ends[0].keys() | ends[1].keys())
    for found in ends:
        close(found, {uid: expected[uid] for uid in found})
    assert any(len(each.unique()) > 1 for each in versions)  # some went on with later weights


class Forgetful:
    """Shows something else each time."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.number = type(self).made

    def reset(self, row, seed):
        return Observation(["go"])

    def step(self, action):
        return Observation([f"visit {self.number}"])


class OtherPictures(Forgetful):
    """Shows another picture of one size each time: the tokens of its observations are the same."""

    def step(self, action):
        return Observation([picture(16, 16, self.number)])


@pytest.mark.parametrize("make", [Forgetful, OtherPictures])
def test_an_environment_that_does_not_repeat_itself_ends_its_episode(make):
    renderer, limits, sampling = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=2), SamplingParams(max_tokens=5)
    (played,) = play_episodes(RandomEngine(renderer), renderer, starts_of(1), make, sampling, limits)
    assert played.ended == "turns"
    run = EpisodePlan(make, limits).run()
    with ending(run.close):
        again = run.begin(played.start, played.begun)
        run.advance([again], Decoding(RandomEngine(renderer), renderer, sampling, WholeGroups(["a"], 1)))
    assert again.ended == "invalid"
    assert again.message == "its environment did not repeat what it showed before turn 1"


class Roles:
    """An actor and a rollout role whose groups are whole in another order than they began."""

    def __init__(self, path: str, carries: bool) -> None:
        optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
        self.actor = ActorWorker(ActorConfig(path, optimizer=optimizer), torch.device("cpu"))
        group = LocalGroup(RolloutWorker(RolloutConfig(path), lambda dtype: self.actor.named_weights()))
        self.rollout = CarryingRollout(group, loader_of(path), 0, lambda: 0, apart=True)
        self.prompts = next(self.rollout)
        if not carries:
            self.rollout = group
            self.prompts.pop(non_tensor_batch_keys=[OWNER])
        self.reward, self.scores_apart = SimpleNamespace(score=scored), False

    def sync_weights(self) -> None:
        self.rollout.mark_stale()


def scored(data: DataProto) -> DataProto:
    """Rewards tokens by their ids."""
    mask = data["response_mask"]
    rewards = (data["responses"] % 11) * mask.float()
    return DataProto.from_dict({"token_level_rewards": rewards}, {"score": rewards.sum(1).numpy().astype(object)})


def weights_after_a_step(path: str, make, algorithm: GRPOConfig, carries: bool = False):
    roles = Roles(path, carries)
    data, metrics = make(roles, roles.prompts, algorithm, SAMPLING)
    return data, metrics, {name: weight.detach().clone() for name, weight in roles.actor.named_weights()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "token-mean", "correction": "token"},
        {"aggregation": "seq-mean-token-sum-norm"},
        {"minibatch": 1},
        {"advantage": "reinforce_plus_plus", "skip_old_log_probs": True, "minibatch": 1},
    ],
)
def test_a_step_in_parts_is_the_step_of_the_whole_batch(path, options):
    """Float32: metrics to 1e-4 of their size; weights to 1e-5 after a step of 1e-3, almost all of them."""
    algorithm = GRPOConfig(**{"n": 2, "kl_coef": 0.0, "entropy_coef": 0.01} | options)
    expected, before, waited = weights_after_a_step(path, grpo_step, algorithm)
    data, after, begun = weights_after_a_step(path, grpo_step_in_parts, algorithm, carries=True)
    assert data["uid"].tolist() == expected["uid"].tolist()
    assert torch.equal(data["responses"], expected["responses"])
    for name in ("actor/grad_norm", "actor/loss", "actor/entropy", "actor/pg_loss"):
        assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6)
    names = {name for name in before if not name.startswith(("timing", "perf"))}
    assert names | {name for name in before if name.startswith("timing") and name.count("/") == 1} <= set(after)
    for name in names:
        assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5)
    moved = torch.cat([(begun[name] - waited[name]).abs().flatten() for name in waited])
    assert float((moved > 1e-5).float().mean()) < 1e-3  # Adam's first step is the sign of gradients that are almost 0


def test_a_reference_scores_the_parts_of_a_step(path):
    algorithm = GRPOConfig(n=2, kl_coef=0.1, minibatch=BATCH)
    found = []
    for make, carries in ((grpo_step, False), (grpo_step_in_parts, True)):
        roles = Roles(path, carries)
        roles.reference = reference_worker(roles.actor.config.frozen(), roles.actor)
        found.append(make(roles, roles.prompts, algorithm, SAMPLING))
    (_, before), (data, after) = found
    assert data["ref_log_prob"].shape == data["responses"].shape
    assert after["actor/kl_loss"] == pytest.approx(before["actor/kl_loss"], rel=1e-3, abs=1e-6)
    assert after["actor/grad_norm"] == pytest.approx(before["actor/grad_norm"], rel=1e-4)


class Lost:
    """A rollout role whose engine is lost after the first part of a batch."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group

    def in_parts(self, prompts: DataProto, sampling: SamplingParams):
        data = self.group.generate(prompts, sampling)
        yield data[: len(data) // 2]
        raise RequestFailed("the engine is lost")


def test_a_failed_step_in_parts_leaves_nothing_in_the_actor(path):
    algorithm = GRPOConfig(n=2, kl_coef=0.0)
    _, expected, fresh = weights_after_a_step(path, grpo_step, algorithm)
    roles = Roles(path, carries=False)
    group, roles.rollout = roles.rollout, Lost(roles.rollout)
    with pytest.raises(RequestFailed, match="the engine is lost"):
        grpo_step_in_parts(roles, roles.prompts, algorithm, SAMPLING)
    assert all(weight.grad is None for weight in roles.actor.module.parameters())
    with pytest.raises(InvalidConfig, match="call accumulate first"):
        roles.actor.finish_update()
    roles.rollout = group
    _, metrics = grpo_step(roles, roles.prompts, algorithm, SAMPLING)
    assert metrics["actor/grad_norm"] == expected["actor/grad_norm"]
    assert all(torch.equal(weight, fresh[name]) for name, weight in roles.actor.named_weights())


def test_an_update_that_nothing_was_added_to_is_refused(path):
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    with pytest.raises(InvalidConfig, match="call accumulate first"):
        actor.finish_update()


# With an engine that answers with the number of its weights


def steps_of(bound, count, state=None, done=0, apart=False):
    """The rollout, and of each step its groups, the versions of their weights, and the number of groups that were decoded."""
    group, updates = Group(), [done]
    rollout = CarryingRollout(group, LookAhead(Numbers()), bound, lambda: updates[0], lambda: updates[0] < 5, apart)
    if state is not None:
        rollout.load_state_dict(state)
    found = []
    for _ in range(count):
        data = rollout.generate(next(rollout), SamplingParams())
        assert torch.equal(data["old_log_probs"], data["rollout_log_probs"])
        found.append(([int(uid) for uid in data["uid"]], data["weight_version"][:, 0].int().tolist()))
        updates[0] += 1
    return rollout, found, group.calls


def test_a_batch_decoded_ahead_is_one_update_old():
    """By hand: three groups at a time in the first step, of which the newest finish first; later ones before their update."""
    _, found, calls = steps_of(1, 4, apart=True)
    assert found == [([1, 2], [1, 1]), ([0, 3], [1, 1]), ([4, 5], [2, 2]), ([6, 7], [3, 3])]
    assert [(groups, wanted) for groups, wanted, _ in calls] == [(3, 2), (2, 2), (2, 2), (2, 2), (2, 2)]


def test_a_step_in_parts_gives_each_part_as_soon_as_it_is_whole():
    group = Group()
    rollout = CarryingRollout(group, LookAhead(Numbers()), 0, lambda: 0, apart=True)
    found = [(part["uid"].tolist(), len(group.calls)) for part in rollout.in_parts(next(rollout), SamplingParams())]
    assert found == [(["1"], 2), (["0"], 2)]  # the second part is being decoded when the first one is given
    assert group.calls == [(2, 1, ()), (1, 1, ("0",))]
    assert rollout.samples.finished is rollout.samples.unfinished is None


def test_the_oldest_groups_are_waited_for():
    """By hand: three groups at a time, of which the newest finish first."""
    rollout, found, calls = steps_of(1, 3)
    assert found == [([1, 2], [1, 1]), ([0, 4], [2, 2]), ([3, 6], [3, 3])]
    assert calls == [(3, 2, ()), (3, 2, ("0",)), (3, 2, ("3",))]
    assert rollout.samples.unfinished["_dealt"].tolist()[0] == 7  # where it goes on
    _, found, _ = steps_of(2, 3)
    assert found == [([1, 2], [1, 1]), ([3, 4], [2, 2]), ([0, 6], [3, 3])]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("parts", [1, 4])
def test_no_group_is_older_than_the_bound_and_each_is_learned_from_once(bound, parts, apart):
    """The newest groups finish first. Groups that continue are those that have begun, at most half a batch."""
    group, updates, ages, everything = Group(), [0], [], []
    rollout = CarryingRollout(group, LookAhead(Numbers(8)), bound, lambda: updates[0], apart=apart)
    for _ in range(8):
        rows = rollout.in_parts(next(rollout), SamplingParams(), parts=parts)
        taken = [uid for part in rows for uid in part["uid"]]
        assert len(taken) == len(set(taken)) == 8
        ages += [updates[0] + 1 - group.first[uid] for uid in taken]
        everything += taken
        updates[0] += 1
    assert len(set(everything)) == len(everything) == 64
    assert max(ages) == bound
    assert set(map(int, everything)) >= set(range(64 - 12 * max(bound, 1)))


def test_the_prompts_of_a_step_may_be_sliced():
    """They are the run's, as their column says, so that they carry over as a whole batch does."""
    rollout = CarryingRollout(Group(), LookAhead(Numbers(4)), 1, lambda: 0)
    prompts = next(rollout)
    halves = [rollout.generate(prompts[half], SamplingParams()) for half in (slice(2), slice(2, 4))]
    assert [data["uid"].tolist() for data in halves] == [["1", "4"], ["5", "6"]]
    assert all(OWNER not in data and "weight_version" in data for data in halves)


def test_a_saved_state_holds_what_is_decoded_ahead():
    for bound in (1, 2):
        _, expected, _ = steps_of(bound, 4, apart=True)
        rollout, first, _ = steps_of(bound, 2, apart=True)
        _, second, _ = steps_of(bound, 2, rollout.state_dict(), done=2, apart=True)
        assert [*first, *second] == expected
        learned = [uid for groups, _ in expected for uid in groups]
        assert len(set(learned)) == len(learned)


def test_episodes_are_carried_over():
    group, loader = Group(), LookAhead(Numbers())
    roles = workers.Roles(SimpleNamespace(), group, {})
    state = StepState()
    limits = EpisodeLimits(turns=2)
    batches, _ = carry_samples(roles, loader, 1, state, 5, corrected=True)
    roles = with_episodes(roles, Played(EpisodePlan(Corridor, limits)))
    data = roles.rollout.generate(next(batches), SamplingParams())
    assert data["uid"].tolist() == ["1", "2"]
    assert group.plan == EpisodePlan(Corridor, limits)


class Telling:
    """Tells how far it came if the task is number 1."""

    def reset(self, row, seed):
        self.info = {"far": 1.0} if "number 1" in str(row["raw_prompt"]) else {}
        return Observation(["go"])

    def step(self, action):
        return Observation(["on"], reward=float(len(action)), done=True, info=self.info)


@pytest.mark.slow
def test_episodes_learn_early_though_their_info_differs(path):
    """The episodes of one of two prompts say how far they came."""
    roles = Roles(path, carries=True)
    learner = workers.Roles(roles.actor, roles.rollout, {})
    learner = with_episodes(learner, Played(EpisodePlan(Telling, EpisodeLimits(turns=2))))
    data, _ = grpo_step_in_parts(learner, roles.prompts, GRPOConfig(n=2, kl_coef=0.0), SAMPLING)
    assert data["far"].tolist() == [info.get("far") for info in data["info"]]
    assert {None, 1.0} == set(data["far"])


def test_other_prompts_are_generated_for_at_once():
    rollout, _, calls = steps_of(1, 1)
    held_out = next(Numbers())
    assert rollout.generate(held_out, SamplingParams()) is held_out
    assert len(calls) == 1
    assert rollout.calls is calls  # whatever else the group has


def test_a_saved_position_does_not_count_what_was_only_looked_at():
    loader = LookAhead(Numbers())
    for _ in range(3):
        next(loader)
    loader.peek(2)
    assert loader.loader.drawn == 6
    other = LookAhead(Numbers())
    other.load_state_dict(loader.state_dict())
    assert next(other)["uid"].tolist() == next(loader)["uid"].tolist() == ["6", "7"]


APART = "--on ray --layout.rollout 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rollout.staleness -1", "at least 0"),
        ("--rollout.staleness 1 --algorithm.loss dapo", r"dynamic sampling .* leave out --rollout\.staleness"),
        (f"{APART} --rollout.staleness 0 --algorithm.advantage remax", r"remax needs greedy .* leave out"),
        ("--rollout.over-ask 1.25", r"--rollout\.staleness N takes its place"),
        ("--rollout.ahead", r"--rollout\.staleness N takes its place"),
        ("--rollout.parts 2", r"--rollout\.staleness N takes its place"),
        ("--rollout.early-update", r"--rollout\.staleness N takes its place"),
        ("--rollout.max-staleness 2", r"--rollout\.staleness N takes its place"),
        ("--rollout.early-rewards", r"--rollout\.staleness 0"),
    ],
)
def test_options_that_contradict_each_other_or_have_ended_are_refused(options, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message):
        parse(in_files(options.split(), tmp_path))


def test_the_step_is_the_plain_one_unless_something_is_decoded_meanwhile():
    assert step_for(parse([])) is step_for(parse(["--rollout.staleness", "0"])) is grpo_step
    assert step_for(parse(APART.split())) is step_for(parse([*APART.split(), "--rollout.staleness", "1"])) is grpo_step
    assert step_for(parse([*APART.split(), "--rollout.staleness", "0"])) is grpo_step_in_parts
    roles, loader, state = SimpleNamespace(rollout=Group()), LookAhead(Numbers()), StepState()
    for bound in (None, 0):
        assert carry_samples(roles, loader, bound, state, 5)[0] is loader
