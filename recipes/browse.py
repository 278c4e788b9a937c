"""An agent with a browser: ``dataproto browse`` trains a policy to press the button of a page that it sees in screenshots.

The agent is what a user writes: `press` talks to the policy through OpenAI's client, and drives Chromium by playwright. With no
arguments it makes a small Qwen2.5-VL, shows it the form of an answer by random clicks, and lets it find out by itself where the
button is, on the CPU within minutes. It needs ``pip install openai playwright`` and Chromium.

Each evaluation presses the buttons of pages that are made for it, and measures a control: the same pages with buttons that cannot
be seen.
"""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from recipes.configs.browse_config import BrowseConfig, parse
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.demo.problems import EPOCH_ROWS, RowsBySeed, Split, task_row
from recipes.grpo import step_for
from recipes.options import training_command
from recipes.run.episode_roles import Played
from recipes.run.policy_gradient import PolicyTask, prompt_builder, prompt_loader, run
from recipes.run.run_directory import open_run_directory
from recipes.run.synthetic_environment import MODEL, SmallModel, controlled_evaluation, demonstrated_model
from rollout.agents import AgentPlan, AgentTask, in_process

SIDE, BUTTON = 112, 48  # pixels of a page and of its button
CLICKS = [f"{x} {y}" for x in range(14, SIDE, 28) for y in range(14, SIDE, 28)]
"""Those of the demonstrations: of any button at least one of them is a press."""
TASK = "Press the button: say where to click."
PAGE = """<body style="margin:0; overflow:hidden"><button onclick="document.title = 'pressed'" style="position:absolute;
left:{left}px; top:{top}px; width:{button}px; height:{button}px; background:#1e3cc8; border:0; opacity:{opacity}"></button>"""


async def press(task: AgentTask) -> dict[str, float]:
    """Clicks where the policy says, until the button is pressed or no turn is left."""
    from openai import APIStatusError

    browser = await asyncio.shield(chromium())
    client = browser.client.copy(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    messages: list[Any] = list(task.messages)
    async with browser.page() as page:
        await page.set_content(PAGE.format(**task.row["extra_info"], button=BUTTON))
        while True:
            url = f"data:image/png;base64,{base64.b64encode(await page.screenshot()).decode()}"
            messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
            try:
                reply = await client.chat.completions.create(model=task.model, messages=messages)
            except APIStatusError:  # no turn is left
                return {"score": 0.0, "acc": 0.0}
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            words = (messages[-1]["content"] or "").split()
            if len(words) == 2 and all(word.isdecimal() for word in words):
                await page.mouse.click(*(min(int(word[:4]), SIDE) for word in words))
            if await page.title() == "pressed":
                return {"score": 1.0, "acc": 1.0}


class Chromium:
    """A browser for all episodes of a run."""

    def __init__(self, context: Any) -> None:
        from openai import AsyncOpenAI

        self.context, self.pages = context, list[Any]()
        self.client = AsyncOpenAI(api_key="of each episode")

    @classmethod
    async def opened(cls) -> "Chromium":
        """A new one."""
        from playwright.async_api import async_playwright

        playwright = await async_playwright().start()
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": SIDE, "height": SIDE}, offline=True)
        context.set_default_timeout(0)  # an episode has a limit of its own
        return cls(context)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Any]:
        """A page that no other episode has."""
        page = self.pages.pop() if self.pages else await self.context.new_page()
        yield page  # one whose episode was cancelled is not used again
        self.pages.append(page)


@cache
def chromium() -> "asyncio.Task[Chromium]":
    """The browser, which the first episode opens."""
    return asyncio.create_task(Chromium.opened())


class PageRows(RowsBySeed):
    """Pages as rows of prompts. ``opacity`` 0: their buttons cannot be seen."""

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS, opacity: int = 1) -> None:
        super().__init__(seed, split, rows)
        self.opacity, self.source = opacity, "browse" if opacity else "browse_unseen_buttons"

    def row(self, place: int) -> dict[str, Any]:
        """A page.

        >>> PageRows()[7]["prompt"]
        [{'role': 'system', 'content': 'Press the button: say where to click.'}]
        """
        random = Random(f"browse/{self.split}/{self.seed}/{place}")
        left, top = (random.randrange(SIDE - BUTTON + 1) for _ in range(2))
        return task_row(TASK, self.source, place, left=left, top=top, opacity=self.opacity)


class RandomClicks(RowsBySeed):
    """Clicks at random as conversations: they teach the form of an answer, and nothing about the pictures."""

    def row(self, place: int) -> dict[str, Any]:
        """Two clicks on a page."""
        random, page = Random(f"random clicks/{self.seed}/{place}"), PageRows(self.seed)[place]
        left, top = (page["extra_info"][name] for name in ("left", "top"))
        image = Image.new("RGB", (SIDE, SIDE), "white")
        ImageDraw.Draw(image).rectangle((left, top, left + BUTTON - 1, top + BUTTON - 1), "#1e3cc8")
        turns = [{"role": "user", "content": "<image>"}, {"role": "assistant"}]
        said = [turn | {"content": turn.get("content") or random.choice(CLICKS)} for turn in 2 * turns]
        return page | {"prompt": [*page["prompt"], *said], "images": [image, image]}


SMALL = SmallModel(texts=[*(20 * [TASK]), *(20 * CLICKS)], demonstrations=RandomClicks)


def browse_task(config: BrowseConfig) -> PolicyTask:
    """The run of `press` on pages, from the checkpoint that is given or from the small model."""
    config = open_run_directory(config, config.updates)
    path = config.run.output_dir / MODEL
    model = config.model_path or str(
        demonstrated_model(path, config.run.seed, SMALL, WarmUpPhaseConfig(), config.run.resume)
    )
    builder = prompt_builder(config.data, model)
    own, unseen = (PageRows(0, "test", config.data.eval_rows, opacity) for opacity in (1, 0))
    evaluate = controlled_evaluation(config, lambda step: own, [unseen], builder)
    loader = prompt_loader(config, builder, PageRows(config.run.seed), shuffle=False)
    played = Played(AgentPlan(in_process(press), config.agents.limits()))
    return PolicyTask(config, model, builder, loader, None, evaluate, played)


main = training_command(parse, run, step_for, lambda _: browse_task)
