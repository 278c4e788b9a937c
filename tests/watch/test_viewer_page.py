"""The viewer in headless Chromium: what a reader sees and does."""

import base64
import io
import os
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.kept_runs import load_kept, scored_batch, write_run
from helpers.tiny_prompts import tiny_tokenizer
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.viewer import ViewerServer

pytestmark = pytest.mark.chromium

ATTACK = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> so red"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def is_wrong(message):
    """Whether a console message is an error, other than the answer to a filter that is not understood."""
    return message.type == "error" and "400 (Bad Request)" not in message.text


@contextmanager
def shown(browser, run):
    """The page that shows a run, which must log no error and ask no other server."""
    complaints, addresses = [], set()
    with ViewerServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
        thread.start()
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.on("console", lambda message: complaints.append(message.text) if is_wrong(message) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: addresses.add(request.url.split("/")[2]))
        page.goto(server.url)
        page.wait_for_selector(".tokens span")
        yield page
        assert complaints == []
        assert addresses == {server.url.split("/")[2]}
        page.close()
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser, tmp_path):
    """A run and its page."""
    run = write_run(tmp_path / "run")
    with shown(browser, run) as page:
        yield run, page


def until(page, condition):
    """Waits until a JavaScript expression holds. (Playwright's own way evaluates text in the page, which its policy forbids.)"""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def chosen(page):
    """The text of the chosen row in the list, once it is written."""
    until(page, """(document.querySelector('#list [aria-selected="true"]') ?? {}).innerText""")
    return page.inner_text('#list [aria-selected="true"]')


def colours(page, sample):
    """The background of each token of a sample, as (red, green, blue, alpha)."""
    found = page.eval_on_selector_all(
        f'.sample[data-sample="{sample}"] .tokens span',
        "all => all.map(each => getComputedStyle(each).backgroundColor)",
    )
    values = [[float(value) for value in re.findall(r"[\d.]+", colour)] for colour in found]
    return [value if len(value) == 4 else [*value, 1.0] for value in values]


def first_paint(page):
    """Milliseconds from the request of the page until something is seen."""
    return page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")


def test_the_first_screen_shows_the_group_with_coloured_tokens(opened, tmp_path):
    _, page = opened
    assert page.inner_text("#name") == "run"
    assert "step 3" in chosen(page)
    boxes = [each.bounding_box() for each in page.query_selector_all(".sample")]
    assert len(boxes) == 4
    assert all(box["width"] >= 280 and box["height"] > 60 for box in boxes)
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    picture = page.wait_for_selector(".pictures img.tiny")
    box = picture.bounding_box()
    assert box["width"] >= 100
    assert abs(box["width"] - box["height"]) < 3
    rewards = {
        int(each.get_attribute("data-sample")): float(re.search(r"reward ([\d.]+)", each.inner_text())[1])
        for each in page.query_selector_all(".sample")
    }
    best, worst = max(rewards, key=rewards.get), min(rewards, key=rewards.get)
    assert all(green > red and alpha > 0 for red, green, _, alpha in colours(page, best))
    assert all(red > green and alpha > 0 for red, green, _, alpha in colours(page, worst))
    path = Path(os.environ.get("SCREENSHOTS", tmp_path)) / "viewer.png"
    page.mouse.move(0, 0)
    page.screenshot(path=path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert pixels.shape == (800, 1280, 3)
    red, green, blue = pixels[:, 400:].transpose(2, 0, 1)  # the group's side
    greenish, reddish = (green > red + 25) & (green > blue + 10), (red > green + 25) & (red > blue + 10)
    assert greenish.sum() > 300
    assert reddish.sum() > 300
    print(f"first paint after {first_paint(page):.0f} ms, {path}")


def test_tokens_take_the_colour_of_the_number_that_is_asked_for(opened):
    _, page = opened
    page.keyboard.press("t")
    assert page.input_value("#colour") == "log-prob"
    strengths = [alpha for *_, alpha in colours(page, 0)]
    assert strengths == sorted(strengths)
    assert strengths[-1] > strengths[0] + 0.3
    page.keyboard.press("t")
    assert page.input_value("#colour") == "difference"
    strengths = [alpha for *_, alpha in colours(page, 0)]
    assert strengths[0::2] == [0] * len(strengths[0::2])
    assert min(strengths[1::2]) > 0.7
    page.keyboard.press("t")
    assert {alpha for *_, alpha in colours(page, 0)} == {0}
    page.hover('.sample[data-sample="0"] .tokens span:nth-child(2)')
    facts = page.inner_text("#token")
    assert "engine -0.2" in facts
    assert "actor 0.05" in facts
    assert "difference 0.25" in facts


def test_the_keyboard_is_enough(opened):
    _, page = opened
    texts = [chosen(page)]
    for key in ("j", "ArrowDown", "k", "ArrowUp"):
        page.keyboard.press(key)
        texts.append(chosen(page))
    assert texts[0] == texts[4] != texts[1] == texts[3] != texts[2]
    for key, step in (("ArrowLeft", 2), ("ArrowLeft", 1), ("ArrowLeft", 1), ("ArrowRight", 2)):
        page.keyboard.press(key)
        until(page, f"document.querySelector('#list [aria-selected=true]').innerText.includes('step {step}')")
    page.keyboard.press("/")
    page.keyboard.type("reward>=0.5 uid:prompt-1")
    until(page, "document.querySelectorAll('#list li').length < 5")
    assert "of 8" in page.inner_text("#count")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.input_value("#filter") == "reward>=0.5 uid:prompt-1"
    page.keyboard.press("g")
    until(page, "[...document.querySelectorAll('.sample')].filter(each => each.offsetParent).length === 1")
    page.keyboard.press("c")
    assert page.is_visible("#curves svg")
    assert not page.is_visible("#list")
    page.keyboard.press("c")
    assert page.is_visible("#list")
    page.click("a >> text=Curves")  # a link, which a reader can keep and go back from
    assert page.url.endswith("#tab-curves")
    page.reload()
    until(page, "document.querySelector('#curves svg') && document.querySelector('#rollouts').hidden")
    page.go_back()
    until(page, "document.querySelector('#curves').hidden")
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    page.keyboard.press("Escape")
    assert not page.is_visible("#keys")


def test_rows_of_supervised_training_show_their_loss(opened):
    run, page = opened
    rows = scored_batch(["red", "green"], [0.0, 0.0], ["a", "b"])
    rows["input_ids"] = rows["attention_mask"] * 0 + rows["responses"][:, :1]
    rows["input_ids"][:, -rows["responses"].shape[1] :] = rows["responses"]
    rows["actor_log_probs"] = rows["old_log_probs"]
    rows.pop(
        ["responses", "token_level_rewards", "rollout_log_probs", "old_log_probs", "advantages"],
        ["score", "acc", "format"],
    )
    rows["response_mask"] = rows["attention_mask"][:, 1:] * (torch.arange(rows["input_ids"].shape[1] - 1) >= 2)
    log_probs = rows["actor_log_probs"]
    rows["actor_log_probs"] = torch.zeros_like(rows["response_mask"], dtype=torch.float32)
    rows["actor_log_probs"][:, -log_probs.shape[1] :] = log_probs
    KeptRollouts(run, 8, tiny_tokenizer()).keep(4, rows)
    until(page, "document.querySelector('#list [aria-selected=true]')?.innerText.includes('step 4')")
    assert chosen(page).startswith("loss 0.")
    until(page, "document.querySelector('#colour')?.value === 'log-prob'")
    assert "loss" in page.inner_text(".sample header")
    assert "reward" not in page.inner_text(".sample header")
    assert max(alpha for *_, alpha in colours(page, 0)) > 0.5


def agents_rows():
    """The rows of an episode: a tool that returns a picture, and a sub-agent, whose conversation is a row of its own."""
    from openai import OpenAI

    from helpers.agents import LOOK, ScriptedEngine, run, tool_renderer
    from helpers.episodes import picture
    from rollout.agents.agent_loop import agent_columns
    from rollout.environments.episode_rows import episode_columns

    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    def agent(task):
        with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            talk = [{"role": "system", "content": "You look."}, *task.messages]
            reply = client.chat.completions.create(model=task.model, messages=talk, tools=[look]).choices[0].message
            shown = [
                {"type": "image_url", "image_url": {"url": png_uri(picture(56, 28))}},
                {"type": "text", "text": "It is here."},
            ]
            talk += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": shown}]
            client.chat.completions.create(model=task.model, messages=talk, tools=[look])
            task.reward(0.5)
            client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": "Help."}])
        return -1.0

    renderer = tool_renderer()
    episodes = run(renderer, ScriptedEngine(renderer, LOOK, "Red.", "No."), agent)
    prompts = renderer.builder([{"prompt": "Which colour is it?", "uid": "u"}])
    data = episode_columns(prompts, episodes, renderer, 1000)
    agent_columns(data, episodes)
    data["advantages"] = data["response_mask"] * 1.0
    return data, renderer.builder.tokenizer


def png_uri(image):
    content = io.BytesIO()
    image.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def test_an_episode_of_an_agent_is_a_conversation(opened, tmp_path):
    run, page = opened
    data, tokenizer = agents_rows()
    KeptRollouts(run, 8, tokenizer).keep(4, data)
    until(page, "document.querySelectorAll('.sample .talk').length === 2")
    titles = [each.text_content() for each in page.query_selector_all(".sample header b")]
    assert titles == ["episode 0, row 1 of 2", "episode 0, row 2 of 2"]
    first, second = page.query_selector_all(".sample")[:2]
    roles = [each.inner_text() for each in first.query_selector_all(".message > b")]
    assert roles == ["system", "system", "user", "turn 1", "tool", "turn 2"]
    said = [each.inner_text() for each in first.query_selector_all(".message pre")]
    assert '"name": "look"' in said[0]
    assert (said[1].strip(), said[2].strip()) == ("You look.", "Which colour is it?")
    assert '{"name": "look", "arguments"' in said[3]
    assert said[4].strip() == "It is here."
    until(page, "document.querySelector('.message img').naturalWidth === 56")
    assert len(first.query_selector_all(".message img")) == 1
    assert page.query_selector_all(".pictures img") == []  # pictures are where they were seen
    assert "reward 0.5" in first.text_content()
    assert "new row: conversation" in second.text_content()
    assert "Help." in second.text_content()
    assert "reward -1" in second.text_content()
    page.fill("#filter", "row:conversation")
    until(page, "document.querySelectorAll('#list li').length === 1")
    page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / "conversation.png")


FILTERS = {
    "reward>=0.5 uid:prompt-1": lambda row: row["reward"] >= 0.5 and row["uid"] == "prompt-1",
    'response:"IS BLUE"': lambda row: "is blue" in row["response"],
    "acc=0 truncated=1": lambda row: row["parts"]["acc"] == 0 and row["truncated"],
    "mismatch<.1e1": lambda row: row["mismatch"] < 1,
    "truth:re sample!=0": lambda row: row["sample"] != 0,
    "prompt-0": lambda row: row["uid"] == "prompt-0",
    "text:reward>1": lambda row: False,
}


def test_a_filter_has_numbers_and_texts(opened):
    run, page = opened
    rows = [row for step in (1, 2, 3) for row in load_kept(run, step)]
    counts = {}
    for text, fits in FILTERS.items():
        found = page.evaluate("([rows, text]) => matching(rows, text)", [rows, text])
        assert found == [row for row in rows if fits(row)], text
        counts[text] = len(found)
    assert 0 < counts["reward>=0.5 uid:prompt-1"] < counts["prompt-0"] < counts["mismatch<.1e1"] == len(rows)
    for text, says in (
        ("rewrd>1", "no field 'rewrd' to compare: choose one of step"),
        ('uid:"a', "no closing quotation"),
    ):
        with pytest.raises(Exception, match=says):
            page.evaluate("([rows, text]) => matching(rows, text)", [rows, text])
    unknown = rows[0] | {"mismatch": None}
    assert page.evaluate("rows => matching(rows, 'mismatch<9')", [unknown]) == []
    order = page.evaluate("rows => inOrder(rows, 'mismatch', false).map(row => row.mismatch)", [unknown, *rows[:2]])
    assert order == [*sorted(row["mismatch"] for row in rows[:2]), None]


def test_rollouts_of_all_steps_are_sorted(opened):
    _, page = opened
    page.select_option("#step", "all")
    until(page, "document.querySelectorAll('#list li').length === 24")
    page.select_option("#sort", "reward")
    until(page, "document.querySelector('#list li').innerText.startsWith('reward 1 ')")
    rewards = [
        float(re.match(r"reward ([\d.]+)", each.inner_text())[1]) for each in page.query_selector_all("#list li")
    ]
    assert rewards == sorted(rewards, reverse=True)
    page.click("#order")
    until(page, "document.querySelector('#list li').innerText.startsWith('reward 0 ')")


SORTED = {
    "reward": r"reward ([\d.]+)",
    "length": r"(\d+) tokens",
    "mismatch": r"mismatch ([\d.]+)",
    "uid": r"· (prompt-\d+)$",
}
"""What an entry of the list says of a field."""


def test_a_thousand_rollouts_are_painted_within_a_second_and_sorted_by_each_field(browser, tmp_path):
    run = write_run(tmp_path / "run", steps=4, groups=25, samples=10)
    with shown(browser, run) as page:
        times = [first_paint(page)]
        while min(times) >= 1000 and len(times) < 3:  # other work on the machine takes time too
            page.reload()
            page.wait_for_selector(".tokens span")
            times.append(first_paint(page))
        assert min(times) < 1000
        page.select_option("#step", "all")
        until(page, "document.querySelector('#count').innerText === '1000 rollouts'")
        for field, pattern in SORTED.items():
            page.select_option("#sort", field)
            falling = listed(page, pattern)
            page.click("#order")
            rising = listed(page, pattern)
            falling, rising = (rising, falling) if page.inner_text("#order") == "↓" else (falling, rising)
            assert falling == sorted(falling, reverse=True)
            assert rising == sorted(rising)
            assert falling[0] > rising[0]


def listed(page, pattern):
    """What the entries of the list say."""
    texts = page.eval_on_selector_all("#list li", "all => all.map(each => each.textContent)")
    found = [re.search(pattern, each)[1] for each in texts]
    return [each if each.startswith("prompt") else float(each) for each in found]


def test_new_steps_appear_by_themselves_and_their_text_stays_text(opened):
    run, page = opened
    page.keyboard.press("/")
    page.keyboard.type("rewrd>1")
    page.wait_for_selector("#problem:visible")
    assert "no field 'rewrd'" in page.inner_text("#problem")
    page.fill("#filter", "")
    page.wait_for_selector("#problem", state="hidden")
    KeptRollouts(run, 8, tiny_tokenizer()).keep(4, scored_batch([ATTACK, "red"], [1.0, 0.0], ["<b>u</b>"] * 2))
    with MetricsLog(run, resume_after=3) as log:
        log.log(4, {"val-core/<script>/acc/mean@1": 0.5})
    until(page, "document.querySelector('#detail').innerText.includes('onerror')")
    assert page.inner_text('.sample[data-sample="0"] .tokens') == ATTACK
    assert page.title() == "run"
    assert page.query_selector("#detail script, #list script, #curves script, .tokens img") is None
    assert page.input_value("#step") == "4"
