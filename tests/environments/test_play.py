"""Episodes on the Hugging Face engine through the rollout role, and environments that fail."""

import asyncio
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.errors import InvalidConfig, InvalidPrompt
from helpers.checkpoints import write_checkpoint
from helpers.episodes import DrawnEnvironment, RandomEngine, picture, play_episodes, prompts_of, renderer_of, starts_of
from recipes.run.episode_roles import Played, PlayingRollout
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodePlan, Observation, TurnRenderer
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episode_loop import WORTH_WAITING
from rollout.environments.episode_rows import episode_columns
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from rollout.prompts.image_processing import ImageCache
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    path = write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    rollout = RolloutWorker(RolloutConfig(path), lambda dtype: actor.named_weights())
    return actor, rollout, PromptBuilder.from_pretrained(path, max_prompt_length=300)


class Corridor:
    """Two steps with a picture each; counts the processed images."""

    def reset(self, row, seed):
        self.left = 2
        return Observation(["where to?", picture(16, 16, 0)])

    def step(self, action):
        self.left -= 1
        info = {"left": np.int64(self.left), "name": "corridor", "object": self}
        return Observation([picture(24, 16, self.left), "on"], reward=1.0 + self.left, done=not self.left, info=info)


SAMPLING = SamplingParams(n=2, max_tokens=4, seed=3, stop_token_ids=tuple(range(0, 250, 2)))


def test_a_row_holds_an_episode(roles):
    _, rollout, builder = roles
    prompts = builder([{"prompt": "Walk.", "uid": "a"}, {"prompt": "Run, please.", "uid": "b"}])
    data = rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3))
    assert data["trajectory"].tolist() == ["a/0", "a/1", "b/0", "b/1"]
    for row in range(4):
        mask, turn = data["response_mask"][row].bool(), data["turn"][row]
        rewards = data["token_level_rewards"][row]
        for number in range(1, int(data["turns"][row]) + 1):
            last = (mask & (turn == number)).nonzero()[-1]
            assert float(rewards[last]) == (2.0 if number == 1 else 1.0) or data["end_reason"][row] == "length"
        assert (data["rollout_log_probs"][row][mask] < 0).all()
        assert (data["weight_version"][row] == torch.where(mask, 1, 0)).all()
    finished = [row for row in range(4) if data["end_reason"][row] == "done"]
    assert finished
    assert data["info"][finished[0]] == {"left": 0, "name": "corridor"}
    assert all(data["score"][row] == 3.0 and data["turns"][row] == 2 for row in finished)
    assert all(len(data["multi_modal_data"][row]["image"]) == 2 for row in finished)
    again = rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3))
    assert again["responses"].equal(data["responses"])
    assert [len(states) for states in data["states"]] == data["turns"].tolist()
    assert len({states[0] for states in data["states"]}) == 1  # the corridor begins alike for everybody
    assert all(len(set(states)) == len(states) for states in data["states"])
    assert again["states"].tolist() == data["states"].tolist()


def test_episodes_that_a_limit_cut_can_be_left_out(roles):
    _, rollout, builder = roles
    prompts = builder([{"prompt": "Walk.", "uid": "a"}, {"prompt": "Run, please.", "uid": "b"}])
    sampling, limits = replace(SAMPLING, n=6, max_tokens=1), EpisodeLimits(turns=2)
    kept = PlayingRollout(rollout, Played(EpisodePlan(Corridor, limits))).generate(prompts, sampling)
    dropped = PlayingRollout(rollout, Played(EpisodePlan(Corridor, limits), drop_cut=True)).generate(prompts, sampling)
    assert {"done", "length"} <= set(kept["end_reason"])
    for row, reason in enumerate(kept["end_reason"]):
        expected = kept["response_mask"][row] * (reason == "done")
        assert dropped["response_mask"][row].equal(expected)


@pytest.mark.parametrize("last_pictures", [None, 1])
def test_the_actor_scores_episodes_as_the_engine_does(roles, last_pictures):
    actor, rollout, builder = roles
    prompts = builder([{"prompt": "Walk.", "uid": "a"}, {"prompt": "Run, please.", "uid": "b"}])
    data = rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3, last_pictures=last_pictures))
    assert (len(data) > 4) == (last_pictures is not None)
    log_probs = actor.log_probs(data)["old_log_probs"]
    mask = data["response_mask"].bool()
    assert float((log_probs - data["rollout_log_probs"])[mask].abs().max()) < 1e-5


@pytest.mark.parametrize("model_type", ["qwen2_5_omni_thinker"])
def test_sounds_of_a_prompt_are_heard_in_all_turns(model_type, tmp_path):
    path = write_checkpoint(model_type, tmp_path)
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    rollout = RolloutWorker(RolloutConfig(path), lambda dtype: actor.named_weights())
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)
    sounds = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 9_000)).astype(np.float32)
    prompts = builder(
        [{"prompt": "<audio>Walk.", "uid": str(row), "audios": [sound]} for row, sound in enumerate(sounds)]
    )
    data = rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3))
    log_probs, mask = actor.log_probs(data)["old_log_probs"], data["response_mask"].bool()
    assert float((log_probs - data["rollout_log_probs"])[mask].abs().max()) < 1e-5
    assert all(len(kinds["audio"]) == 1 and kinds["image"] for kinds in data["multi_modal_data"])


def test_log_probs_that_episodes_do_not_have_are_refused(roles):
    _, rollout, builder = roles
    sampling, prompts = replace(SAMPLING, top_log_probs=1), builder([{"prompt": "Walk.", "uid": "a"}])
    with pytest.raises(InvalidConfig, match=r"asks for top_log_probs, and episodes .* RolloutWorker\.generate"):
        rollout.play(prompts, Corridor, sampling, EpisodeLimits(turns=3))
    with pytest.raises(InvalidConfig, match="asks for top_log_probs, and samples that continue later"):
        rollout.advance(prompts, sampling, wanted=1, weight_version=1)


def test_an_episode_does_not_depend_on_its_batch(roles):
    _, rollout, builder = roles
    rows = [{"prompt": f"Walk {row}.", "uid": f"u{row}"} for row in range(3)]
    together = rollout.play(builder(rows), Corridor, SAMPLING, EpisodeLimits(turns=3))
    alone = rollout.play(builder(rows[2:]), Corridor, SAMPLING, EpisodeLimits(turns=3))
    kept = alone["response_mask"].shape[1]
    assert together[4:]["responses"][:, :kept].equal(alone["responses"])


def test_each_distinct_picture_is_processed_once(roles, monkeypatch):
    _, rollout, builder = roles
    seen = []
    processor, call = rollout.renderer.builder, rollout.renderer.builder.image_processor.__class__.__call__

    def counted(self, *args, images, **options):
        seen.append(images[0].tobytes())
        return call(self, *args, images=images, **options)

    monkeypatch.setattr(type(processor.image_processor), "__call__", counted)
    monkeypatch.setattr(processor, "_processed", ImageCache(2**20))  # an empty one
    prompts = builder([{"prompt": f"Go {row}", "uid": f"u{row}"} for row in range(4)])
    data = rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3))
    shown = {image.tobytes() for media in data["multi_modal_data"] for image in media["image"]}
    assert len(seen) == len(set(seen)) == len(shown) == 2


# Environments that fail


class Failing(DrawnEnvironment):
    """The failure is that of the number that is the seed of the episode."""

    def reset(self, row, seed):
        self.seed, self.steps = seed, 0
        if seed == 1:
            raise KeyError("no map")
        return {2: "text", 6: Observation(["<|image_pad|>"])}.get(seed, Observation(["go", picture(16, 16)]))

    def step(self, action):
        self.steps += 1
        if self.steps < 2:
            return Observation(["on"], reward=0.5)
        return {
            3: Observation(["on"], reward=float("nan")),
            4: Observation(["on", 7]),
            5: None,
        }.get(self.seed, Observation(done=True, reward=1.0, info={"steps": self.steps, "name": "x"}))


def test_failures_end_their_episode_with_a_reason():
    renderer, limits = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=4)
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(7), Failing, SamplingParams(max_tokens=5), limits)
    assert [episode.ended for episode in found] == ["done", "error", *["invalid"] * 5]
    for episode, text in zip(
        found[1:], ["KeyError: 'no map'", "a str", "nan", "content[1]", "NoneType", "<|image_pad|>"], strict=True
    ):
        assert text in episode.message
    assert found[0].info["steps"] == 2
    assert [turn.reward for turn in found[0].turns] == [0.5, 1.0]
    assert [len(episode.turns) for episode in found] == [2, 0, 0, 2, 2, 2, 0]


class Hanging(DrawnEnvironment):
    """Does not return from its second step before the test lets it."""

    def __init__(self):
        self.steps = 0

    let_go = threading.Event()

    def reset(self, row, seed):
        return Observation(["go"])

    def step(self, action):
        self.steps += 1
        if self.steps == 2:
            Hanging.let_go.wait()
        return Observation(["on"], reward=0.5)


@pytest.mark.slow
def test_an_environment_that_hangs_ends_its_episode_alone():
    """What returns while the environment still hangs has not waited for it."""
    renderer, limits = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=4, seconds=5.0)
    (found,) = play_episodes(
        RandomEngine(renderer), renderer, starts_of(1), Hanging, SamplingParams(max_tokens=5), limits
    )
    Hanging.let_go.set()
    assert found.ended == "timeout"
    assert "5 s in all" in found.message
    assert [turn.reward for turn in found.turns][:1] == [0.5]
    assert len(found.turns) == 2


def test_failed_episodes_are_rows_that_nothing_is_learned_from(roles, capsys):
    _, rollout, builder = roles

    class Broken(Corridor):
        def step(self, action):
            raise RuntimeError("gone")

    data = rollout.play(builder([{"prompt": "Walk.", "uid": "a"}]), Broken, SAMPLING, EpisodeLimits(turns=3))
    assert set(data["end_reason"]) <= {"error", "length"}
    assert "error" in data["end_reason"]
    for row in range(2):
        assert bool(data["response_mask"][row].any()) == (data["end_reason"][row] == "length")
    playing = PlayingRollout(rollout, Played(EpisodePlan(Broken, EpisodeLimits(turns=3))))
    for _ in range(2):
        playing.generate(builder([{"prompt": "Walk.", "uid": "a"}]), SAMPLING)
    (told,) = capsys.readouterr().err.splitlines()  # once
    place = rf"\({re.escape(__file__)}:{Broken.step.__code__.co_firstlineno + 1}, in step\)"
    assert re.match(
        rf"warning: the environment of row \d \(uid a, response .*: step raised RuntimeError: gone {place}$", told
    )


class Patient:
    """Async, closed at the end; takes a while."""

    closed, loops = [], set()

    async def reset(self, row, seed):
        Patient.loops.add(threading.get_ident())
        return Observation(["go"])

    async def step(self, action):
        await asyncio.sleep(0.2)
        return Observation(done=True)

    async def close(self):
        Patient.closed.append(self)


def test_async_environments_wait_beside_each_other():
    renderer = renderer_of("qwen2_5_vl")
    began = time.monotonic()
    found = play_episodes(
        RandomEngine(renderer), renderer, starts_of(20), Patient, SamplingParams(max_tokens=5), EpisodeLimits(turns=2)
    )
    assert {episode.ended for episode in found} == {"done"}
    assert time.monotonic() - began < 3
    deadline = time.monotonic() + 5
    while len(Patient.closed) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(map(id, Patient.closed))) == 20
    assert len(Patient.loops) == 1


def test_the_pace_of_environments_changes_no_token():
    renderer = renderer_of("smolvlm")
    found = [
        play_episodes(
            RandomEngine(renderer), renderer, starts_of(30), make, SamplingParams(max_tokens=5), EpisodeLimits(turns=3)
        )
        for make in (PacedAlike, Paced)
    ]
    ids = [[[turn.token_ids for turn in episode.turns] for episode in each] for each in found]
    assert ids[0] == ids[1]


class PacedAlike(DrawnEnvironment):
    """Draws as `Paced`, without its pauses."""

    pause = 0.0

    def step(self, action):
        if self.rng.random() < 0.3:
            time.sleep(self.pause)
        return super().step(action)


class Paced(PacedAlike):
    pause = 0.03


class TwoAtATime(RandomEngine):
    """Completes two requests in a step of 30 ms."""

    longest = 0.0  # step, seconds

    def poll(self):
        began = time.monotonic()
        time.sleep(0.03)
        completions = [self._complete(number) for number in list(self.waiting)[:2]]
        time.sleep(0.001)
        self.longest = max(self.longest, time.monotonic() - began + 0.01)
        return completions


@pytest.mark.slow
def test_the_engine_hardly_waits_for_environments_while_it_has_requests(monkeypatch):
    renderer, given = renderer_of("smolvlm"), []
    engine, poll = TwoAtATime(renderer), EnvironmentHost.poll

    def recorded(host, patience, most):
        given.append((patience, engine.unfinished))
        return poll(host, patience, most)

    monkeypatch.setattr(EnvironmentHost, "poll", recorded)
    monkeypatch.setattr(Paced, "pause", 0.02)  # shorter than a step
    play_episodes(engine, renderer, starts_of(20), Paced, SamplingParams(max_tokens=5), EpisodeLimits(turns=3))
    assert all(patience is None for patience, unfinished in given if not unfinished)
    patient = [patience for patience, unfinished in given if unfinished]
    assert patient
    assert max(patient) <= WORTH_WAITING * engine.longest


class SmallEngine(RandomEngine):
    """Has no room for more than 60 tokens."""

    def submit(self, request, sampling, keep=False):
        if len(request.input_ids) > 60:
            raise InvalidPrompt("too long")
        return super().submit(request, sampling, keep)


def test_an_engine_without_room_ends_an_episode():
    renderer = renderer_of("internvl")
    engine, limits = SmallEngine(renderer), EpisodeLimits(turns=9)
    found = play_episodes(engine, renderer, starts_of(30), DrawnEnvironment, SamplingParams(max_tokens=5), limits)
    full = [episode for episode in found if episode.ended == "tokens"]
    assert full
    assert all("no room for the next turn: too long" in episode.message for episode in full)
    assert all(episode.turns[-1].shown is None for episode in found if episode.turns)
    assert not engine.kept


class Verbose(Corridor):
    """Says more than the model has positions for, after the first turn of every second prompt."""

    def reset(self, row, seed):
        self.words = 2000 if row["uid"] == "b" else 1
        return super().reset(row, seed)

    def step(self, action):
        seen = super().step(action)
        return replace(seen, content=["x " * self.words])


def test_an_observation_longer_than_the_model_has_positions_ends_its_episode(roles):
    """Reading it took as long as its author liked: no limit of tokens is set by default."""
    _, rollout, builder = roles
    prompts = builder([{"prompt": "Walk.", "uid": "a"}, {"prompt": "Run, please.", "uid": "b"}])
    data = rollout.play(prompts, Verbose, replace(SAMPLING, n=4), EpisodeLimits(turns=3))
    of_a, of_b = (set(data["end_reason"][data["uid"] == uid]) for uid in "ab")
    assert "tokens" in of_b
    assert "done" not in of_b
    assert "done" in of_a
    assert "tokens" not in of_a
    messages = [message for message in data["end_message"] if message]
    assert all("no room for the next turn" in each and "exceed the 1024 positions" in each for each in messages)
    assert data["attention_mask"].sum(1).max() < 300


class SmallHFEngine(HFEngine):
    """Has room for some requests only."""

    def submit(self, request, sampling, keep=False):
        if request.uid in self.refused:
            raise InvalidPrompt("too long")
        return super().submit(request, sampling, keep)


def test_an_episode_that_is_refused_at_its_first_turn_has_a_row_with_experts(tmp_path):
    """Beside others, whose experts stay theirs; one of them has the same prompt."""
    builder = PromptBuilder.from_pretrained(write_checkpoint("qwen3_vl_moe", tmp_path), max_prompt_length=300)
    renderer = TurnRenderer(builder)
    renderer.forget = lambda: None  # both plays show the same objects, as the samples of one play do
    engine = SmallHFEngine(str(tmp_path), device=torch.device("cpu"), routed_experts=True)
    prompts, sampling, limits = prompts_of(builder, 3), replace(SAMPLING, n=1), EpisodeLimits(turns=2)
    engine.refused = ()
    whole = play_episodes(engine, renderer, starts_of(3), DrawnEnvironment, sampling, limits)
    engine.refused = ("u1",)
    some = play_episodes(engine, renderer, starts_of(3), DrawnEnvironment, sampling, limits)
    refused = some[1]
    assert (refused.ended, refused.turns) == ("tokens", [])
    expected = episode_columns(prompts, whole, renderer, 300, engine.no_experts)
    alone = episode_columns(prompts, some, renderer, 300, engine.no_experts)
    beside = episode_columns(prompts[[1, 1]], [refused, whole[1]], renderer, 300, engine.no_experts)
    assert [int(alone["response_mask"][row].sum() > 0) for row in range(3)] == [1, 0, 1]
    for name in (PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS):
        for row in (0, 2):
            assert torch.equal(alone[name][row], expected[name][row])
        assert torch.equal(beside[name][1], expected[name][1])
        assert len(beside[name][0]) == len(alone[name][1])
    prompt = expected[PROMPT_ROUTED_EXPERTS][1]
    assert torch.equal(beside[PROMPT_ROUTED_EXPERTS][0], prompt)
    assert torch.equal(alone[PROMPT_ROUTED_EXPERTS][1], torch.zeros_like(prompt))
    assert len(alone[ROUTED_EXPERTS][1]) == 0


def test_pictures_with_a_palette_are_told_apart():
    renderer = renderer_of("qwen2_5_vl")
    red, blue = (Image.new("P", (16, 16)) for _ in range(2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    one, other, again = (renderer.turn(Observation([image])).media["pixel_values"] for image in (red, blue, red))
    assert not one.equal(other)
    assert one is again


def test_limits_are_checked():
    with pytest.raises(InvalidConfig, match="turns=0"):
        EpisodeLimits(turns=0)
    assert np.isinf(EpisodeLimits(turns=1).room(5))
    assert EpisodeLimits(turns=1, tokens=9).room(5) == 4
