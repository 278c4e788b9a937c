"""Episodes and carried samples of mixtures of experts: what the Hugging Face engine records over turns and interruptions are the
experts of one forward pass over each row, in float32. The actor that replays them scores as the engine does.
"""

from dataclasses import replace

import pytest
import torch

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.errors import InvalidConfig, InvalidRow
from helpers.agents import looker
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from helpers.episodes import DrawnEnvironment, picture, prompts_of
from helpers.routes import routes_in_one_pass, routes_of
from helpers.tiny_models import MOE_TYPES, tiny_model
from recipes.run.carrying import CarriedSamples
from rollout.continuation import BEGUN, Tokens, WholeGroups, decode_groups
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.environments.episode_loop import EpisodePlan
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

MOE = "qwen3_vl_moe"
SAMPLING = SamplingParams(n=2, max_tokens=6, seed=3, stop_token_ids=tuple(range(0, 250, 3)))
LIMITS = EpisodeLimits(turns=3, tokens=300)


class Roles:
    """An actor, two rollout workers that follow its weights, and a builder of prompts."""

    def __init__(self, model_type, folder, **options):
        path = write_checkpoint(model_type, folder)
        self.path, self.config = path, RolloutConfig(path, options=options)
        self.actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
        self.builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)

    def worker(self):
        return RolloutWorker(self.config, lambda dtype: self.actor.named_weights())

    def check(self, data):
        """The columns name the experts of one pass over each row, and the actor replays them."""
        family = self.builder.family
        model = family.model_class().from_pretrained(self.path).eval()
        for row in range(len(data)):
            if data["response_mask"][row].any():
                found, expected = routes_of(data, row), routes_in_one_pass(model, family, data[row : row + 1])
                assert torch.equal(found[:-1].long().sort(-1).values, expected[:-1].sort(-1).values)
                assert torch.equal(found[-1], found[-2])  # the last token was not read
        mask = data["response_mask"].bool()
        scored = self.actor.log_probs(data)["old_log_probs"]
        torch.testing.assert_close(scored[mask], data["rollout_log_probs"][mask], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    return Roles(MOE, tmp_path_factory.mktemp(MOE))


@pytest.mark.slow
@pytest.mark.parametrize("last_pictures", [None, 1])
def test_rows_of_episodes_have_the_experts_of_all_their_turns(roles, last_pictures):
    played = replace(LIMITS, last_pictures=last_pictures)
    data = roles.worker().play(prompts_of(roles.builder, 3), DrawnEnvironment, SAMPLING, played)
    assert int(data["turns"].max()) > 1
    assert (len(data) > 6) == (last_pictures is not None)
    roles.check(data)
    if last_pictures is None:  # samples share their prompt's experts
        assert len(data[PROMPT_ROUTED_EXPERTS].storage) == int(
            data["attention_mask"][::2, : data["prompts"].shape[1]].sum()
        )


@pytest.mark.slow
def test_rows_of_agents_have_the_experts_of_all_their_turns(roles):
    data = roles.worker().run(prompts_of(roles.builder, 2), looker, SAMPLING, EpisodeLimits(turns=4))
    assert data["end_reason"].tolist() == ["done"] * 8, data["end_message"].tolist()
    assert data["new_row"].tolist() == ["", "history"] * 4
    roles.check(data)


class LivePage:
    """Shows each sample of a prompt another picture of one size."""

    number = 0

    def reset(self, row, seed):
        LivePage.number += 1
        return Observation(["look", picture(64, 64, LivePage.number)])

    def step(self, action):
        return Observation(["again", picture(64, 64)])


def test_samples_with_other_first_pictures_have_their_own_experts(roles):
    data = roles.worker().play(prompts_of(roles.builder, 1), LivePage, replace(SAMPLING, n=3), LIMITS)
    prompts = data["prompts"]
    assert prompts.equal(prompts[:1].expand_as(prompts))  # the tokens do not tell the pictures
    roles.check(data)


@pytest.mark.long
@pytest.mark.parametrize("model_type", [each for each in MOE_TYPES if each != MOE])
def test_episodes_of_other_families(model_type, tmp_path):
    roles = Roles(model_type, tmp_path)
    roles.check(roles.worker().play(prompts_of(roles.builder, 3), DrawnEnvironment, SAMPLING, LIMITS))


@pytest.mark.slow
def test_turns_whose_cache_was_dropped_have_their_experts(tmp_path):
    roles = Roles(MOE, tmp_path, kept_bytes=0)
    roles.check(roles.worker().play(prompts_of(roles.builder, 3), DrawnEnvironment, SAMPLING, LIMITS))


class Broken(DrawnEnvironment):
    """Fails at once for one prompt, and in a later turn for another."""

    def reset(self, row, seed):
        self.task = row["uid"]
        if self.task == "u0":
            raise RuntimeError("no beginning")
        return super().reset(row, seed)

    def step(self, action):
        if self.task == "u1":
            raise RuntimeError("no end")
        return super().step(action)


def test_rows_of_which_nothing_is_learned_can_be_trained_on_too(roles):
    worker = roles.worker()
    data = worker.play(prompts_of(roles.builder, 3), Broken, SAMPLING, LIMITS)
    assert (data["end_reason"][:4] == "error").all()
    roles.check(data)
    alone = worker.play(prompts_of(roles.builder, 1), Broken, SAMPLING, LIMITS)  # all of which failed
    assert alone[ROUTED_EXPERTS].tail == data[ROUTED_EXPERTS].tail
    assert roles.actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))["actor/grad_norm"] > 0


def advanced(roles, make, wanted=1):
    """Rows of groups that are carried over, one whole group a step, by a new worker each step."""
    samples = CarriedSamples()
    samples.add(prompts_of(roles.builder, 3), SAMPLING.n)
    interrupted = 0
    for step in range(1, 9):
        if samples.unfinished is None:
            break
        found = roles.worker().advance(samples.begin(3, step), SAMPLING, wanted, step, plan=make)
        held = [turn for turns in found[BEGUN] for turn in turns]
        interrupted += sum("experts" in turn for turn in held)
        samples.update(found)
        again = CarriedSamples()
        again.load_state_dict(samples.state_dict())  # as from a checkpoint
        samples = again
    assert interrupted
    return samples.take(3)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, EpisodePlan(DrawnEnvironment, LIMITS)], ids=["responses", "episodes"])
def test_samples_that_go_on_later_keep_their_experts(roles, plan):
    data = advanced(roles, plan)
    assert len(data) == 6
    assert any(len(set(row[row > 0].tolist())) > 1 for row in data["weight_version"])
    roles.check(data)


def test_experts_stay_those_of_the_weights_that_read_a_token(roles):
    """Other weights choose other experts; what was read before is not replaced."""
    engine, family = roles.worker().engine, roles.builder.family
    requests = build_requests(roles.builder(ROWS), replace(SAMPLING, n=1))
    sampling = replace(SAMPLING, n=1, max_tokens=8, ignore_eos=True, stop_token_ids=())
    numbers = [engine.submit(request, sampling) for request in requests]
    for _ in range(3):
        engine.poll()
    begun = [Tokens.of(engine.abort(number), 1) for number in numbers]
    engine.load_weights(tiny_model(MOE, seed=7, config=engine.model.config).named_parameters())

    def rest_of(begun):
        everyone = WholeGroups([str(place) for place in range(len(requests))], len(requests))
        return decode_groups(engine, requests, begun, sampling, everyone, family, 2)

    found = rest_of(begun)
    for request, before, (after, reason) in zip(requests, begun, found, strict=True):
        known = before.experts
        assert reason == "length"
        assert len(known) == len(request.input_ids) + 3
        assert len(after.experts) == len(request.input_ids) + 7
        assert torch.equal(after.experts[: len(known)], known)
    alone = rest_of([Tokens(each.token_ids) for each in begun])
    assert any(not torch.equal(one.experts, other.experts) for (one, _), (other, _) in zip(found, alone, strict=True))


def test_an_engine_that_forgets_the_experts_of_a_turn_is_refused(roles):
    worker = roles.worker()
    poll = worker.engine.poll
    worker.engine.poll = lambda: [replace(each, routed_experts=None) for each in poll()]
    with pytest.raises(
        InvalidRow, match=r"row 0: the engine named the experts of 0 of \d+ tokens: turn routing replay off"
    ):
        worker.play(prompts_of(roles.builder, 1), DrawnEnvironment, SAMPLING, LIMITS)


def test_an_engine_that_cannot_say_how_many_experts_is_refused(roles, monkeypatch):
    monkeypatch.setattr("rollout.hf.decoder.RouteRecorder.nothing", None)
    with pytest.raises(InvalidConfig, match="no attribute no_experts"):
        roles.worker()
