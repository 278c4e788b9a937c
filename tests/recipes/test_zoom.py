"""Looks at a picture and answers: the drawn pictures, looks by words and by calls of a tool, and a run."""

import copy
import json

import numpy as np
import pytest
from PIL import Image

from dataproto.errors import InvalidConfig
from helpers.episodes import RandomEngine, play_episodes
from helpers.geo3k_runs import rows_of
from helpers.tiny_prompts import TEMPLATE, tiny_image_processor, tiny_prompt_config, tiny_tokenizer
from recipes.configs.zoom_config import parse
from recipes.demo.digit_zoom import (
    PLACES,
    SIDE,
    VIEW,
    DigitZoom,
    DigitZoomByTool,
    ZoomRows,
    asked_digit,
    box_of,
    draw_cards,
    draw_part,
    draw_picture,
)
from recipes.zoom import environment_of, main
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, TurnRenderer
from rollout.environments.episode_rows import episode_starts
from rollout.prompts import PromptBuilder

SMALL = (
    "--batch-size 2 --algorithm.n 2 --eval-rows 3 --warm-up.steps 2 --warm-up.batch-size 4 --optimizer.warmup-steps 0"
    " --steps 2 --eval-every 2 --save-every 0"
)


def row_of(shown="own", place=0):
    return ZoomRows(split="test", rows=9, shown=shown)[place]


def test_a_crop_is_the_picture_itself_and_the_whole_is_an_eighth_of_it():
    for place in PLACES:
        crop = draw_part("any", box_of(place))
        assert np.array_equal(np.asarray(crop), np.asarray(draw_picture("any").crop(box_of(place))))
        assert crop.size == (VIEW, VIEW)
    whole = np.asarray(draw_picture("any")).reshape(VIEW, 8, VIEW, 8, 3).mean((1, 3))
    assert np.abs(np.asarray(draw_part("any")) - whole).max() <= 1


def test_a_crop_shows_the_digit_but_not_the_colour_and_only_its_own():
    crops = {}
    for number in range(200):
        for place, card in draw_cards(f"picture {number}").items():
            left, top = (middle - at for middle, at in zip(card.middle, box_of(place)[:2], strict=True))
            key = (card.digit, left, top)
            assert crops.setdefault(key, draw_part(f"picture {number}", box_of(place), all_digits=True)).tobytes() == (
                draw_part(f"picture {number}", box_of(place), all_digits=True).tobytes()
            )
    assert len({crop.tobytes() for crop in crops.values()}) == len(crops)


@pytest.mark.parametrize("place", range(5))
def test_looking_at_the_red_card_and_reading_it_is_right(place):
    row = row_of(place=place)
    name = row["extra_info"]["picture"]
    where = next(where for where, card in draw_cards(name).items() if card.red)
    zoom = DigitZoom()
    zoom.reset(row, seed=0)
    seen = zoom.step(f" {where.upper()}\n")
    assert seen.content[0].tobytes() == draw_part(name, box_of(where)).tobytes()
    assert not seen.done
    end = zoom.step(f"It is {row['reward_model']['ground_truth']}.")
    assert (end.reward, end.done, end.info) == (1.0, True, {"acc": 1.0})
    zoom.reset(row, seed=0)
    assert zoom.step("I see nothing").reward == 0.0


def test_controls_show_another_picture_or_white_crops_but_ask_for_the_same_digit():
    row = row_of()
    where = next(where for where, card in draw_cards(row["extra_info"]["picture"]).items() if card.red)
    own, other, blank = (DigitZoom() for _ in range(3))
    seen = {
        shown: (zoom.reset(row_of(shown), seed=1).content[0].tobytes(), zoom.step(where).content[0].tobytes())
        for shown, zoom in (("own", own), ("other", other), ("blank", blank))
    }
    assert own.picture.truth == other.picture.truth == blank.picture.truth
    assert seen["other"][0] != seen["own"][0] == seen["blank"][0]
    assert seen["blank"][1] == Image.new("RGB", (VIEW, VIEW), "white").tobytes() != seen["own"][1]


def call(**box):
    return f"<tool_call>\n{json.dumps({'name': 'crop', 'arguments': box})}\n</tool_call>"


def test_the_tool_shows_parts_and_says_what_is_wrong_with_a_box():
    zoom, row = DigitZoomByTool(), row_of()
    name = row["extra_info"]["picture"]
    assert zoom.reset(row, 0).content[0].tobytes() == draw_part(name).tobytes()
    left, top, right, bottom = box_of("southwest")
    seen = zoom.step(call(left=left, top=top, right=right, bottom=bottom))
    assert (seen.role, seen.content[0].tobytes()) == ("tool", draw_part(name, box_of("southwest")).tobytes())
    assert zoom.step(call(left=0, top=0, right=SIDE, bottom=224)).content[0].size == (VIEW, VIEW // 2)
    for box in ({"left": 10, "top": 0, "right": 5, "bottom": 9}, {"left": 0, "top": 0, "right": 449, "bottom": 9}):
        assert "is not within the picture" in zoom.step(call(**box)).content[0]
    assert "Error: TypeError" in zoom.step(call(left=1)).content[0]
    end = zoom.step(f"The digit is {asked_digit(name)}.")
    assert (end.reward, end.done, end.info["acc"]) == (1.0, True, 1.0)


CROP = '<tool_call>\n{"name": "crop", "arguments": {"left": 84, "top": 84, "right": 140, "bottom": 140}}\n</tool_call>'


def test_episodes_by_tool_with_a_template_that_describes_it():
    """The prompt has the tool's schema, and the turns are the calls and their pictures."""
    drawn = environment_of(parse_by_tool())
    tokenizer = copy.deepcopy(tiny_tokenizer())
    role = "{{ 'user' if message['role'] == 'tool' else message['role'] }}"
    described = "{%- for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}\n{% endfor %}"
    tokenizer.chat_template = described + TEMPLATE.replace("{{ message['role'] }}", role)
    parts = tokenizer, tiny_image_processor(), tiny_prompt_config()
    builder = PromptBuilder(*parts, 4096, template_arguments=drawn.template_arguments)
    renderer = TurnRenderer(builder)
    prompts = builder(drawn.rows(0, "test", 3, "own")[:3])
    engine = RandomEngine(renderer, answers=(CROP, "0"))
    starts = episode_starts(prompts, SamplingParams(n=4))
    played = play_episodes(engine, renderer, starts, drawn.make, SamplingParams(max_tokens=200), EpisodeLimits(3))
    assert {each.ended for each in played} <= {"done", "turns"}
    assert any(len(each.turns) == 3 for each in played)
    text = builder.tokenizer.decode(played[0].prompt.raw_ids)
    assert "crop: Shows a part of the picture larger" in text
    assert "then say the digit on the red card" in text


def parse_by_tool():
    return parse(["--crop-tool", "--preset", "any", "--model-path", "some/model"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--crop-tool", "needs --model-path"),
        (
            "--crop-tool --preset any --model-path some --environment own.py:Say --data-path rows",
            "has tools of its own",
        ),
        ("--environment own.py:Say", "go together"),
        ("--agent own.py:say --environment own.py:Say", "an episode has one of them"),
        ("--agent own.py:say --last-pictures 1", "an agent keeps its own history"),
        ("--agent own.py:say --data-path rows", "--data-path needs --model-path"),
        ("--agent own.py:say --algorithm.advantage remax", "remax needs one: choose another advantage"),
        (
            "--epochs 2 --data-path rows --environment own.py:Say --preset any --model-path some",
            "the length of a run over episodes",
        ),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(options.split())


@pytest.mark.slow
def test_a_run_looks_answers_measures_the_controls_and_shows_strips(tmp_path, capsys):
    directory = tmp_path / "run"
    assert main([*SMALL.split(), "--output-dir", str(directory)]) == 0
    rows = rows_of(directory)
    assert [name for name in rows[2] if name.endswith("/acc/mean@1")] == [
        "val-core/zoom/acc/mean@1",
        "val-aux/zoom_other_pictures/acc/mean@1",
        "val-aux/zoom_blank_crops/acc/mean@1",
    ]
    assert 1 <= rows[1]["episode/turns/mean"] <= 2
    assert rows[1]["actor/grad_norm"] > 0
    printed = capsys.readouterr().out
    assert "data: synthetic rows, new ones in each step, " in printed
    assert printed.index("2/2") < printed.index("measured: a step takes")
    assert '<div class="strip">' in (directory / "report.html").read_text()
