"""A drawn grid in which the policy walks to a goal that it sees only in pictures: an environment, its rows and its pictures."""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, Literal

from PIL import Image, ImageDraw

from recipes.demo.problems import EPOCH_ROWS, RowsBySeed, Split, task_row
from rollout.environments import Observation

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIDE = 4  # cells along each side of the grid
CELL = 28  # pixels
TURNS = 4  # of a walk in random directions
AGENT, GOAL = (30, 60, 200), (220, 40, 40)
TASK = "Walk to the red square."
SOURCE = "walk"

Place = tuple[int, int]
Shown = Literal["own", "other", "blank"]
"""Which pictures an episode shows: its own, those of another layout each turn, or white ones."""


class GridWalk:
    """Up to six moves to a goal. Each turn shows the grid anew; words that are no move leave the agent where it is.

    The reward of a move is how much nearer it comes to the goal than ever before, as a share of the way from the start: an
    episode that arrives has 1 in all. ``info`` has ``acc``, 1 for an episode that arrived.

    >>> walk = GridWalk()
    >>> shown = walk.reset({"extra_info": {"agent": (0, 0), "goal": (0, 2)}}, seed=0)
    >>> [(each.reward, each.done) for each in map(walk.step, ["right", "stay", "right"])]
    [(0.5, False), (0.0, False), (0.5, True)]
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins at the places ``agent`` and ``goal`` of ``row["extra_info"]``, whose ``shown`` is a `Shown`."""
        layout = row["extra_info"]
        self.agent, self.goal = tuple(layout["agent"]), tuple(layout["goal"])
        self.shown: Shown = layout.get("shown", "own")
        self.way = self.nearest = distance(self.agent, self.goal)
        self.random = Random(f"other pictures/{seed}")
        return Observation([self.picture()], info={"acc": 0.0})

    def step(self, action: str) -> Observation:
        """Moves by the first word of the action."""
        word = (action.split() or [""])[0].lower()
        if word in MOVES:
            self.agent = moved(self.agent, word)
        left = distance(self.agent, self.goal)
        reward = max(self.nearest - left, 0) / self.way
        self.nearest = min(self.nearest, left)
        return Observation([self.picture()], reward, left == 0, {"acc": float(left == 0)})

    def picture(self) -> Image.Image:
        """What this turn shows."""
        if self.shown == "own":
            return draw_grid(self.agent, self.goal)
        return draw_grid(*draw_layout(self.random)) if self.shown == "other" else draw_grid(None, None)


def distance(one: Place, other: Place) -> int:
    """Moves from one place to the other."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def moved(place: Place, move: str) -> Place:
    """The place after a move; the grid's edge holds it.

    >>> moved((0, 0), "down"), moved((0, 0), "up")
    ((1, 0), (0, 0))
    """
    row, column = (min(max(at + by, 0), SIDE - 1) for at, by in zip(place, MOVES[move], strict=True))
    return row, column


def draw_layout(random: Random) -> tuple[Place, Place]:
    """Two different places."""
    agent, goal = random.sample(range(SIDE**2), 2)
    return divmod(agent, SIDE), divmod(goal, SIDE)


@lru_cache(maxsize=1024)
def draw_grid(agent: Place | None, goal: Place | None) -> Image.Image:
    """The picture of a grid: the agent a blue circle, the goal a red square."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    draw = ImageDraw.Draw(image)
    for place, colour, shape in ((goal, GOAL, draw.rectangle), (agent, AGENT, draw.ellipse)):
        if place is not None:
            top, left = (at * CELL + 3 for at in place)
            shape((left, top, left + CELL - 7, top + CELL - 7), fill=colour)
    return image


class WalkRows(RowsBySeed):
    """Layouts as rows of prompts.

    >>> row = WalkRows()[7]
    >>> row["data_source"], sorted(row["extra_info"])
    ('walk', ['agent', 'goal', 'shown'])
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS, shown: Shown = "own") -> None:
        super().__init__(seed, split, rows)
        self.shown, self.source = shown, SOURCE if shown == "own" else f"{SOURCE}_{shown}_pictures"

    def row(self, place: int) -> dict[str, Any]:
        """A layout."""
        agent, goal = draw_layout(Random(f"walk/{self.split}/{self.seed}/{place}"))
        return task_row(TASK, self.source, place, agent=agent, goal=goal, shown=self.shown)


class RandomWalks(RowsBySeed):
    """Walks in random directions as conversations: they teach the form of an answer, and nothing about the pictures.

    >>> [message["content"] for message in RandomWalks()[3]["prompt"]][:5]
    ['Walk to the red square.', '<image>', 'down', '<image>', 'right']
    """

    def row(self, place: int) -> dict[str, Any]:
        """A walk."""
        random = Random(f"random walk/{self.seed}/{place}")
        agent, goal = draw_layout(random)
        messages: list[dict[str, Any]] = [{"role": "system", "content": TASK}]
        images: list[Image.Image] = []
        for _ in range(TURNS):
            images.append(draw_grid(agent, goal))
            move = random.choice(list(MOVES))
            messages += [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": move}]
            agent = moved(agent, move)
        return {"prompt": messages, "images": images, "data_source": SOURCE, "index": place}
