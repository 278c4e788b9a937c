"""The agent with a browser: what it sees and clicks in Chromium, and that the small model learns where the button is."""

import numpy as np
import pytest

from dataproto.errors import InvalidConfig
from helpers.agents import ScriptedEngine, tool_renderer
from recipes.browse import BUTTON, CLICKS, SIDE, PageRows, RandomClicks, main, press
from recipes.configs.browse_config import parse
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from rollout.agents.agent_loop import AgentPlan
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart

LIMITS = EpisodeLimits(turns=2, seconds=60)


def start(left, top, opacity=1):
    page = {"left": left, "top": top, "opacity": opacity}
    return EpisodeStart({"raw_prompt": [{"role": "system", "content": "Press."}], "extra_info": page}, 1, 7, "u", "u/0")


@pytest.mark.chromium
@pytest.mark.parametrize(
    ("left", "top", "opacity", "said", "reward", "turns"),
    [
        (20, 60, 1, ["20 60"], 1.0, 1),
        (20, 60, 1, ["19 60", "67 107"], 1.0, 2),
        (20, 60, 0, ["40 80"], 1.0, 1),
        (20, 60, 1, ["68 60", "up"], 0.0, 2),
        (20, 60, 1, ["9999999 1", "20 60 1"], 0.0, 2),
    ],
)
def test_the_agent_presses_the_button_where_the_policy_clicks(left, top, opacity, said, reward, turns):
    renderer = tool_renderer()
    engine = ScriptedEngine(renderer, *said)
    sampling = SamplingParams(max_tokens=20)
    (episode,) = AgentPlan(press, LIMITS).play(engine, renderer, [start(left, top, opacity)], sampling)
    assert (sum(turn.reward for turn in episode.turns), len(episode.turns)) == (reward, turns), episode.message
    assert episode.ended == ("done" if reward else "turns")
    pictures = engine.requests[-1].multi_modal_data["image"]
    assert [picture.size for picture in pictures] == turns * [(112, 112)]
    blue = (np.asarray(pictures[0].convert("RGB")) == (30, 60, 200)).all(-1)
    assert blue.sum() == (BUTTON**2 if opacity else 0)


def blind_accuracy():
    """The share of all buttons that the best two clicks press which are the same on every page."""
    places = range(SIDE - BUTTON + 1)
    clicks = [tuple(map(int, click.split())) for click in CLICKS]
    pressed = [
        {(left, top) for left in places for top in places if 0 <= x - left < BUTTON and 0 <= y - top < BUTTON}
        for x, y in clicks
    ]
    return max(len(one | other) for one in pressed for other in pressed) / len(places) ** 2


def test_each_button_is_pressed_by_a_click_of_the_demonstrations():
    for row in PageRows(3)[:50]:
        left, top = row["extra_info"]["left"], row["extra_info"]["top"]
        clicks = [tuple(map(int, click.split())) for click in CLICKS]
        assert any(left <= x < left + BUTTON and top <= y < top + BUTTON for x, y in clicks)
    assert PageRows(3)[4] == PageRows(3)[4] != PageRows(4)[4]
    assert PageRows(0, "test")[4]["extra_info"] != PageRows(0)[4]["extra_info"]
    said = [message["content"] for message in RandomClicks(0)[5]["prompt"]]
    assert said[1] == said[3] == "<image>"
    assert {said[2], said[4]} <= set(CLICKS)


@pytest.mark.parametrize("option", ["--agent own.py:agent", "--data-path rows.jsonl", "--reward own.py:score"])
def test_options_that_do_nothing_are_refused(option):
    with pytest.raises(InvalidConfig, match=f"{option.split()[0]} would do nothing: .*dataproto grpo"):
        parse(option.split())


@pytest.mark.long
@pytest.mark.chromium
@pytest.mark.timeout(3000)
def test_the_small_model_learns_to_press(tmp_path):
    assert main(["--output-dir", str(tmp_path / "run")]) == 0
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    curve = [row["val-core/browse/acc/mean@1"] for row in rows if "val-core/browse/acc/mean@1" in row]
    unseen = [row[name] for row in rows for name in row if "unseen" in name and "acc" in name]
    assert curve[0] < 0.3
    assert curve[-1] >= 0.9 > blind_accuracy() + 0.1 > unseen[-1]  # 0.1: two standard deviations of 64 pages
    assert (tmp_path / "run" / "report.html").is_file()
