"""Observations that are no good end their episode with a reason, never the run; and those that environments change afterwards."""

import copy
import io
import json
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from dataproto import DataProto
from dataproto.errors import InvalidConfig, InvalidMedia, InvalidPrompt
from helpers.episodes import RandomEngine, hosting, picture, play_episodes, prompts_of, renderer_of, starts_of
from helpers.tiny_prompts import tiny_builder
from recipes.run.episode_roles import EpisodeReward, Played, PlayingRollout
from recipes.run.evaluation import evaluate_samples
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodePlan, Observation
from rollout.environments.episode_rows import episode_columns, episode_starts
from rollout.environments.other_libraries import from_gymnasium
from rollout.environments.tool_environment import with_tools
from rollout.prompts.images import load_image

SAMPLING = SamplingParams(max_tokens=5)


def opened(image, cut=None, **options):
    """An image that was opened from a file, perhaps from the first bytes of it."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return Image.open(io.BytesIO(file.getvalue()[:cut]))


def closed():
    image = opened(picture(64, 64))
    image.close()
    return image


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raise_wordless():
    raise Wordless


class Lazy(Mapping):
    """Fails when it is read."""

    def __iter__(self):
        raise RuntimeError("not computed")

    def __getitem__(self, name):
        raise RuntimeError("not computed")

    def __len__(self):
        return 1


class Fickle(Sequence):
    """A text when it is read first, and a number later."""

    read = 0

    def __getitem__(self, place):
        if place:
            raise IndexError
        self.read += 1
        return "go" if self.read == 1 else 7

    def __len__(self):
        return 1


WRONG = {
    "an error without a message": (raise_wordless, "error", "raised Wordless: (its message cannot be made"),
    "a file that is cut": (lambda: Observation([opened(picture(64, 64), 800)]), "invalid", "content[0] an image that"),
    "a file that is closed": (lambda: Observation(["so", closed()]), "invalid", "content[1] an image that cannot"),
    "no width": (lambda: Observation([Image.new("RGB", (0, 5))]), "invalid", "is empty: 0 x 5 pixels"),
    "no pixels": (lambda: Observation([Image.new("RGB", (0, 0))]), "invalid", "is empty: 0 x 0 pixels"),
    "half of a character": (lambda: Observation(["a", "bc\ud83d"]), "invalid", r"half of a character, '\ud83d', at"),
    "more than float32 holds": (lambda: Observation(reward=1e39), "invalid", "reward 1e+39, not a finite number"),
    "a number without end": (lambda: Observation(reward=10**400), "invalid", "not a finite number of float32"),
    "an end for each of two": (
        lambda: Observation(done=np.array([True, False])),
        "invalid",
        "done=array([ True, False])",
    ),
    "an end in words": (lambda: Observation(done="False"), "invalid", "done='False', not True or False"),
    "info that cannot be read": (
        lambda: Observation(["go"], info=Lazy()),
        "error",
        "raised RuntimeError: not computed",
    ),
}


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_observation_ends_its_episode_alone(wrong, step):
    make, reason, message = WRONG[wrong]

    class Environment:
        def reset(self, row, seed):
            self.seed = seed
            return make() if seed and not step else Observation(["go"])

        def step(self, action):
            return make() if self.seed else Observation(done=True, reward=1.0)

    renderer = renderer_of("qwen2_5_vl")
    limits = EpisodeLimits(turns=3, seconds=10.0)
    first, second = play_episodes(RandomEngine(renderer), renderer, starts_of(2), Environment, SAMPLING, limits)
    assert (first.ended, first.turns[0].reward) == ("done", 1.0)
    assert second.ended == reason
    assert message in second.message
    assert " at 0x" not in second.message  # equal failures have equal messages, which are shown once


def test_a_list_that_changes_is_read_once():
    class Environment:
        def reset(self, row, seed):
            return Observation(Fickle())

        def step(self, action):
            return Observation(["on"], done=np.True_, reward=np.float32(0.5))

    renderer = renderer_of("qwen2_5_vl")
    (found,) = play_episodes(
        RandomEngine(renderer), renderer, starts_of(1), Environment, SAMPLING, EpisodeLimits(turns=3)
    )
    assert (found.ended, found.turns[0].reward) == ("done", 0.5)
    assert renderer.builder.tokenizer.decode(found.prompt.input_ids).count("go") == 1


def test_the_largest_reward_stays_finite_in_a_row():
    class Rich:
        def reset(self, row, seed):
            return Observation(["go"])

        def step(self, action):
            return Observation(reward=-float(np.finfo(np.float32).max), done=True)

    renderer = renderer_of("qwen2_5_vl")
    prompts = prompts_of(renderer.builder, 1)
    starts, limits = episode_starts(prompts, SAMPLING), EpisodeLimits(turns=1)
    episodes = play_episodes(RandomEngine(renderer), renderer, starts, Rich, SAMPLING, limits)
    assert episode_columns(prompts, episodes, renderer, 5)["token_level_rewards"].isfinite().all()


def test_images_and_texts_of_data_sets_are_refused_alike():
    with pytest.raises(InvalidMedia, match="is empty: 7 x 0 pixels"):
        load_image(Image.new("L", (7, 0)))
    with pytest.raises(InvalidPrompt, match="half of a character"):
        tiny_builder("qwen2_5_vl", max_prompt_length=100).prepare({"prompt": "a \udc00"})


# Environments that change what they have shown


class Painter:
    """Shows copies of its picture and of its list, or always the same ones, on which it goes on."""

    copies, mode = True, "RGB"

    def reset(self, row, seed):
        self.canvas, self.seen, self.steps = Image.new(self.mode, (24, 24)), [], 0
        return self._shown()

    def step(self, action):
        return self._shown()

    def _shown(self):
        self.steps += 1
        self.canvas.paste((40 * self.steps, 9, 200), (0, 0, 4 * self.steps, 24))
        self.seen[:] = [f"step {self.steps}", self.canvas]
        return Observation(
            [part if isinstance(part, str) else part.copy() for part in self.seen] if self.copies else self.seen
        )


class Repainter(Painter):
    copies = False


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_turns_show_again_what_was_shown_though_the_environment_has_drawn_on_it(mode, monkeypatch):
    monkeypatch.setattr(Painter, "mode", mode)
    rows = []
    for make in (Painter, Repainter):
        renderer, limits = renderer_of("qwen2_5_vl"), EpisodeLimits(turns=4, last_pictures=2)
        prompts = prompts_of(renderer.builder, 1)
        starts = episode_starts(prompts, SAMPLING)
        episodes = play_episodes(RandomEngine(renderer), renderer, starts, make, SAMPLING, limits)
        rows.append(episode_columns(prompts, episodes, renderer, 100))
    assert len(rows[0]) == 3
    assert torch.equal(rows[0]["input_ids"], rows[1]["input_ids"])
    for one, other in zip(rows[0]["multi_modal_inputs"], rows[1]["multi_modal_inputs"], strict=True):
        assert [part["pixel_values"].tolist() for part in one] == [part["pixel_values"].tolist() for part in other]
    shown = [image for media in rows[1]["multi_modal_data"] for image in media["image"]]
    assert len(set(map(id, shown))) == 4  # each picture is one object in all rows


def test_pictures_that_differ_by_more_than_their_bytes_are_told_apart():
    renderer, image = renderer_of("qwen2_5_vl"), picture(24, 24)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    grey = Image.fromarray(np.tile(np.arange(24, dtype=np.uint8), (24, 1)))
    for plain, other in (
        (opened(image), opened(image, exif=exif)),
        (opened(grey), opened(grey, transparency=3)),
    ):
        plain.load(), other.load()
        assert plain.tobytes() == other.tobytes()
        one, two = (renderer.turn(Observation([each])).media["pixel_values"] for each in (plain, other))
        assert not one.equal(two)
        assert renderer.digest(Observation([plain])) != renderer.digest(Observation([other]))


def test_a_picture_with_a_transparent_colour_is_not_one_that_was_converted():
    renderer = renderer_of("qwen2_5_vl")
    file = opened(Image.new("RGB", (16, 16)), transparency=(0, 0, 0))
    file.load()
    copied = file.copy()
    assert copied.info == file.info
    for image, value in ((file, 255), (copied, 0)):
        (shown,) = renderer.turn(Observation([image])).shown
        assert shown.image.getpixel((0, 0)) == (value,) * 3


def test_a_picture_that_exif_turns_does_not_take_the_place_of_an_upright_one():
    """Both have one size in their files; 24 x 56 pixels make other grids than 56 x 24, and here other positions."""
    renderer, image = renderer_of("qwen2_5_vl"), picture(56, 84)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turns = [renderer.turn(Observation([each])) for each in (opened(image), opened(image, exif=exif))]
    upright, turned = (turn.media["image_grid_thw"][0].tolist() for turn in turns)
    assert upright == [turned[0], turned[2], turned[1]]
    assert upright[1] != upright[2]
    for turn, shown in zip(turns, (image, image.transpose(Image.Transpose.ROTATE_270)), strict=True):
        alone = renderer_of("qwen2_5_vl").turn(Observation([shown]))
        assert turn.position_ids.equal(alone.position_ids)
        assert turn.media["pixel_values"].equal(alone.media["pixel_values"])


def test_equal_pixels_in_other_files_are_one_state():
    renderer, image = renderer_of("qwen2_5_vl"), Image.new("RGB", (16, 16), (255, 0, 0))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    found = {renderer.digest(Observation([each])) for each in (image, opened(image), palette, image.convert("RGBA"))}
    assert len(found) == 1
    media = [renderer.turn(Observation([each])).media for each in (image, opened(image), palette)]
    assert media[0] is media[1] is media[2]


@pytest.mark.slow
def test_environments_may_show_one_file_that_was_not_read_before():
    file = opened(picture(1200, 1200))

    class Album:
        def reset(self, row, seed):
            return Observation([file])

        def step(self, action):
            return Observation(done=True)

    renderer = renderer_of("qwen2_5_vl", max_pixels=784)
    found = play_episodes(RandomEngine(renderer), renderer, starts_of(32), Album, SAMPLING, EpisodeLimits(turns=1))
    assert [episode.message for episode in found] == [""] * 32


# What is told beside the content


class Rollouts:
    def __init__(self, renderer, engine=RandomEngine):
        self.renderer, self.engine = renderer, engine

    def episodes(self, prompts, plan, sampling):
        engine, starts = self.engine(self.renderer), episode_starts(prompts, sampling)
        episodes = play_episodes(engine, self.renderer, starts, plan.make_environment, sampling, plan.limits)
        return episode_columns(prompts, episodes, self.renderer, 5)


INFO = {"values": 3.0, "acc": True, "speed": 0.5, "score": 9.0, "turns": 7, "info_turns": 8}


def test_info_may_have_any_keys(capsys):
    """Numbers under names of the library's columns were left out without a word."""

    class Telling:
        def reset(self, row, seed):
            return Observation(["go"])

        def step(self, action):
            return Observation(done=True, reward=1.0, info=INFO | {1: 2.0, None: "x"})

    renderer = renderer_of("qwen2_5_vl")
    role = PlayingRollout(Rollouts(renderer), Played(EpisodePlan(Telling, EpisodeLimits(turns=1))))
    for _ in range(2):
        data = role.generate(prompts_of(renderer.builder, 2), SAMPLING)
    assert data["info"].tolist() == [INFO] * 2
    assert data["score"].tolist() == [1.0, 1.0]
    renamed = {"values": "info_values", "score": "info_score", "turns": "info_info_turns"}
    for name, value in INFO.items():
        assert data[renamed.get(name, name)].tolist() == [value] * 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].split()[0] for line in told] == sorted(renamed)
    assert "turns in the environment's info is the column info_info_turns" in told[1]
    data |= DataProto.from_dict({"values": torch.ones(2, data["responses"].shape[1])})  # a critic's


def test_info_may_be_a_number_in_one_episode_and_a_text_in_another(tmp_path):
    """An evaluation, its report and its metrics raised for a text, and for an integer that float does not hold."""

    class Telling:
        def reset(self, row, seed):
            self.uid = row["uid"]
            return Observation(["go"])

        def step(self, action):
            told = {"u0": {"acc": 1, "n": 10**5000}, "u1": {"acc": "yes"}}[self.uid]
            return Observation(done=True, reward=0.5, info=told)

    renderer = renderer_of("qwen2_5_vl")
    role = PlayingRollout(Rollouts(renderer), Played(EpisodePlan(Telling, EpisodeLimits(turns=1))))
    prompts = prompts_of(renderer.builder, 2)
    prompts["data_source"] = np.array(["told"] * 2, dtype=object)
    roles = SimpleNamespace(rollout=role, reward=EpisodeReward())
    metrics, (data,) = evaluate_samples(roles, [prompts], SAMPLING, tmp_path, 0)
    assert data["acc"].tolist() == [1, None]
    assert data["info"].tolist() == [{"acc": 1}, {"acc": "yes"}]
    assert metrics["val-core/told/acc/mean@1"] == 1.0


class Consuming:
    """Takes its task out of the row, and counts its steps there."""

    def reset(self, row, seed):
        self.left = row.pop("extra_info")
        self.left["steps"][0] -= 1
        self.left["marks"][0] += 1
        row["raw_prompt"][0]["content"] = "gone"
        return Observation([str(self.left["steps"])])

    def step(self, action):
        return Observation(done=True, reward=float(10 * self.left["steps"][0] + self.left["marks"][0]))


def test_an_environment_may_change_its_row():
    renderer = renderer_of("qwen2_5_vl")
    task = {"extra_info": {"steps": [3], "marks": np.array([0])}}
    prompts = renderer.builder([{"prompt": "Go.", "uid": "u", **task}])
    for _ in range(2):
        data = Rollouts(renderer).episodes(prompts.repeat(3), EpisodePlan(Consuming, EpisodeLimits(turns=1)), SAMPLING)
        assert data["end_reason"].tolist() == ["done"] * 3
        assert data["score"].tolist() == [21.0] * 3
    assert prompts["raw_prompt"][0][0]["content"] != "gone"


class Drawing:
    """Draws on the pictures of its row, and says which values it found there."""

    def reset(self, row, seed):
        pictures = [row["images"][0], row["shown"][1], row["grid"][0]["picture"], row["opened"].item()]
        found = [each.getpixel((0, 0)) for each in pictures] + [len(row["seen"]), int(row["marks"][0])]
        same = row["images"][0] is row["shown"][1]
        for each in pictures[1:]:
            each.putpixel((0, 0), each.getpixel((0, 0)) + 1)
        row["seen"].add(2), row["marks"].add_(1), row["grid"][0].clear()
        return Observation([f"{found} {same}"])


def test_an_environment_may_draw_on_the_pictures_of_its_row():
    """Pictures, and what tuples and arrays of objects hold, were those of the other samples."""
    one, other = Image.new("L", (4, 4), 7), Image.new("L", (4, 4), 8)
    grid, file = np.empty(1, dtype=object), np.empty((), dtype=object)
    grid[0], file[()] = {"picture": other}, opened(Image.new("L", (64, 64), 9))
    row = {"images": [one], "shown": ("a", one), "grid": grid, "opened": file}
    row |= {"seen": {1}, "marks": torch.tensor([5]), "broken": opened(picture(64, 64), 800)}
    with hosting(Drawing, seconds=60.0) as host:
        for number in range(8):
            host.reset(str(number), row, 0)
        answers = []
        while len(answers) < 8:
            answers += host.poll(None)
    assert [outcome.content for _, outcome in answers] == [["[7, 7, 8, 9, 1, 5] True"]] * 8
    assert (one.getpixel((0, 0)), other.getpixel((0, 0)), list(grid[0])) == (7, 8, ["picture"])


class Flaky:
    """Tells whether it was right, unless it breaks."""

    def reset(self, row, seed):
        self.breaks = str(row["uid"]) in ("u2", "u3")
        return Observation(["go"])

    def step(self, action):
        if self.breaks:
            raise RuntimeError("broken")
        return Observation(done=True, reward=1.0, info={"acc": 1.0})


def test_an_evaluation_keeps_its_accuracy_though_all_episodes_of_a_batch_fail(tmp_path):
    renderer = renderer_of("qwen2_5_vl")
    role = PlayingRollout(Rollouts(renderer), Played(EpisodePlan(Flaky, EpisodeLimits(turns=1))))
    roles = SimpleNamespace(rollout=role, reward=EpisodeReward())
    prompts = prompts_of(renderer.builder, 4)
    metrics, _ = evaluate_samples(roles, [prompts[:2], prompts[2:]], SAMPLING, tmp_path, 1)
    assert metrics["val-core//acc/mean@1"] == 1.0
    assert metrics["val-core//reward/mean@1"] == 0.5


class FullEngine(RandomEngine):
    def submit(self, request, sampling, keep=False):
        raise InvalidPrompt(f"{len(request.input_ids)} tokens are too many")


def test_prompts_for_which_there_is_no_room_are_told_once(capsys):
    renderer = renderer_of("qwen2_5_vl")
    played = Played(EpisodePlan(Flaky, EpisodeLimits(turns=1)))
    role = PlayingRollout(Rollouts(renderer, FullEngine), played)
    for _ in range(2):
        data = role.generate(prompts_of(renderer.builder, 3), SAMPLING)
        assert data["end_reason"].tolist() == ["tokens"] * 3
    (told,) = capsys.readouterr().err.splitlines()
    assert re.match(r"warning: the episode of row 0 \(uid u0\) has no turn, .*: \d+ tokens are too many$", told)


# Adapters


def look(what: list) -> dict:
    """Shows its argument."""
    return {"seen": what}


@pytest.mark.parametrize("argument", ["[" * 2000, "[" * 400 + "]" * 400, "[" * 985 + "]" * 985])
def test_a_policy_that_nests_its_call_without_end_is_told_so(argument):
    """It ends no episode: a reward and a next turn follow."""
    environment = with_tools([look], lambda row, answer: 0.5)()
    environment.reset({}, 0)
    (told,) = environment.step(
        f'<tool_call>{{"name": "look", "arguments": {{"what": {argument}}}}}</tool_call>'
    ).content
    assert told.startswith(("Error: ", '{"seen": [['))
    assert environment.step("I do not know.").reward == 0.5


def test_a_value_that_json_does_not_have_is_told():
    def loop() -> list:
        found: list = []
        found.append({"found": found})
        return found[0]

    environment = with_tools([loop])()
    environment.reset({}, 0)
    (told,) = environment.step('<tool_call>{"name": "loop"}</tool_call>').content
    assert told == "Error: ValueError: Circular reference detected"


def test_what_the_policy_makes_a_tool_return_can_be_shown():
    def search(query: str) -> str:
        if query == "error":
            raise KeyError("\ud83d")
        return f"nothing about {query}"

    environment = with_tools([search])()
    environment.reset({}, 0)
    for query, told in (("\ud83d", "nothing about ?"), ("error", "Error: KeyError: ")):
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        (text,) = environment.step(f"<tool_call>{call}</tool_call>").content
        assert text.startswith(told)
        assert text.encode()


def test_gymnasium_without_a_render_mode_is_refused():
    class Dark:
        def reset(self, seed, options):
            return 0, {}

        def render(self):
            return None

    with pytest.raises(InvalidConfig, match='render_mode="rgb_array"'):
        from_gymnasium(Dark, {"left": 0})().reset({}, seed=1)


def test_an_episode_begins_with_the_tools_of_its_row():
    renderer = renderer_of("qwen2_5_vl")
    builder = renderer.builder
    builder.tokenizer = copy.deepcopy(builder.tokenizer)
    builder.tokenizer.chat_template = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}" + str(
        builder.tokenizer.chat_template
    )
    prompts = builder([{"prompt": "Look.", "tools": [{"name": "zoom"}]}, {"prompt": "Look."}])
    texts = []
    for start in episode_starts(prompts, SAMPLING):
        texts.append(builder.tokenizer.decode(renderer.prompt(start.row, Observation(["It is dark."])).raw_ids))
    assert texts[0] == f"[zoom]{texts[1]}"
