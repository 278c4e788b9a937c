"""A picture that is shown too small to read, and that the policy can look into: an environment, its rows and its pictures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Literal, cast

from PIL import Image, ImageDraw

from recipes.demo.problems import EPOCH_ROWS, RowsBySeed, Split, font_of, task_row
from rollout.environments import Observation, ToolEnvironment

SIDE, VIEW = 448, 56  # pixels along each side of a picture, and of what is shown of it at a time
FONT, CARD, EDGE = 32, 96, 16  # pixels: of the digits, along each side of a card, and of its coloured edge
SHIFT = 4  # pixels by which a card is out of the middle of its quarter, at most
PLACES = {"northwest": (0, 0), "northeast": (1, 0), "southwest": (0, 1), "southeast": (1, 1)}
"""The quarters of a picture, by column and row."""
RED, GREY, INK = (215, 40, 40), (200, 200, 200), (30, 30, 30)
TASK = "Say northwest, northeast, southwest or southeast to look there, then say the digit on the red card."
TOOL_TASK = f"The picture of {SIDE} x {SIDE} pixels is shown small. Crop it, then say the digit on the red card."
SOURCE = "zoom"

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the picture."""
Shown = Literal["own", "other", "blank"]
"""What an episode shows: its own picture, another one, or its own one but white crops."""


@dataclass(frozen=True)
class Card:
    """A card of a picture, and the digit that it has or could have."""

    digit: int
    red: bool
    middle: tuple[int, int]


def draw_cards(name: str) -> dict[str, Card]:
    """The cards of a picture by their places: one near the middle of each quarter, and one of them red.

    >>> sorted(card.red for card in draw_cards("any").values())
    [False, False, False, True]
    """
    random = Random(name)
    red = random.choice(list(PLACES))
    cards = {}
    for place, quarter in PLACES.items():
        left, top = (middle + random.randint(-SHIFT, SHIFT) for middle in _middle(quarter))
        cards[place] = Card(random.randrange(10), place == red, (left, top))
    return cards


def asked_digit(name: str) -> str:
    """The digit that a picture's task asks for."""
    return next(str(card.digit) for card in draw_cards(name).values() if card.red)


@lru_cache(maxsize=256)
def draw_picture(name: str, all_digits: bool = False) -> Image.Image:
    """A picture at its full size. Only the red card has its digit, or with ``all_digits`` each card."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    for card in draw_cards(name).values():
        left, top = (middle - CARD // 2 for middle in card.middle)
        draw.rectangle((left, top, left + CARD - 1, top + CARD - 1), outline=RED if card.red else GREY, width=EDGE)
        if card.red or all_digits:
            draw.text(card.middle, str(card.digit), INK, font_of(FONT), "mm", stroke_width=1, stroke_fill=INK)
    return image


@lru_cache(maxsize=4096)
def draw_part(name: str, box: Box = (0, 0, SIDE, SIDE), all_digits: bool = False) -> Image.Image:
    """A part of a picture with at most ``VIEW`` pixels a side: the whole one shrinks to an eighth, a small part keeps its size.

    >>> draw_part("any").size, draw_part("any", (0, 0, 112, 56)).size, draw_part("any", (0, 0, 28, 28)).size
    ((56, 56), (56, 28), (28, 28))
    """
    width, height = box[2] - box[0], box[3] - box[1]
    scale = max(width, height, VIEW) / VIEW
    size = max(round(width / scale), 1), max(round(height / scale), 1)
    return draw_picture(name, all_digits).resize(size, Image.Resampling.BOX, box)


def box_of(place: str) -> Box:
    """The part of a picture that is seen at its full size at a place: the middle of that quarter.

    >>> box_of("northeast")
    (308, 84, 364, 140)
    """
    left, top = (middle - VIEW // 2 for middle in _middle(PLACES[place]))
    return left, top, left + VIEW, top + VIEW


def _middle(quarter: tuple[int, int]) -> tuple[int, int]:
    return SIDE // 4 + quarter[0] * SIDE // 2, SIDE // 4 + quarter[1] * SIDE // 2


class ShownPicture:
    """The picture of an episode, as far as it is shown."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """``row["extra_info"]`` has the name of the ``picture``, and what is ``shown`` of it, a `Shown`."""
        name, self.shown = row["extra_info"]["picture"], row["extra_info"].get("shown", "own")
        self.truth = asked_digit(name)
        self.name = f"{name}/other" if self.shown == "other" else name

    def part(self, box: Box) -> Image.Image:
        """A crop."""
        image = draw_part(self.name, box)
        return Image.new("RGB", image.size, "white") if self.shown == "blank" else image

    def score(self, answer: str) -> float:
        """1 if the last digit of the answer is the one that was asked for."""
        return float(re.findall(r"\d", answer)[-1:] == [self.truth])


class DigitZoom:
    """A look, or several, and an answer. The picture is shown small; an action that names one of its `PLACES` shows a crop.

    Any other action is the answer and ends the episode. ``info`` has ``acc``, 1 for the right digit.

    >>> zoom = DigitZoom()
    >>> zoom.reset({"extra_info": {"picture": "any"}}, seed=0).content[0].size
    (56, 56)
    >>> zoom.step("Northwest.").content[0].size, zoom.step(asked_digit("any")).reward
    ((56, 56), 1.0)
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Shows the whole picture of the row; see `ShownPicture`."""
        self.picture = ShownPicture(row)
        return Observation([draw_part(self.picture.name)], info={"acc": 0.0})

    def step(self, action: str) -> Observation:
        """Shows a place, or scores the answer."""
        words = " ".join(action.lower().split())
        place = next((place for place in PLACES if place in words), None)
        if place is not None:
            return Observation([self.picture.part(box_of(place))], info={"acc": 0.0})
        score = self.picture.score(action)
        return Observation(reward=score, done=True, info={"acc": score})


class DigitZoomByTool(ToolEnvironment):
    """As `DigitZoom`, but a look is a call of the tool `crop`, in the form that the chat template teaches."""

    def __init__(self) -> None:
        super().__init__([self.crop], score=lambda row, answer: self.picture.score(answer))

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Shows the whole picture of the row; see `ShownPicture`."""
        super().reset(row, seed)
        self.picture = ShownPicture(row)
        return Observation([draw_part(self.picture.name)], info={"acc": 0.0})

    def step(self, action: str) -> Observation:
        """Answers calls, or scores the answer."""
        shown = cast(Observation, super().step(action))  # its tool is a plain function
        return Observation(shown.content, shown.reward, shown.done, {"acc": shown.reward}, shown.role)

    def crop(self, left: int, top: int, right: int, bottom: int) -> Image.Image:
        """Shows a part of the picture larger: at most 56 x 56 pixels are shown at a time, at full resolution.

        Args:
            left: Left edge of the part, in pixels of the picture.
            top: Top edge of the part, in pixels of the picture.
            right: Right edge of the part, in pixels of the picture.
            bottom: Bottom edge of the part, in pixels of the picture.
        """
        box = int(left), int(top), int(right), int(bottom)
        if not (0 <= box[0] < box[2] <= SIDE and 0 <= box[1] < box[3] <= SIDE):
            raise ValueError(f"the part {box} is not within the picture of {SIDE} x {SIDE} pixels")
        return self.picture.part(box)


class ZoomRows(RowsBySeed):
    """Pictures as rows of prompts; each is drawn when it is shown.

    >>> row = ZoomRows()[7]
    >>> row["data_source"], row["extra_info"]
    ('zoom', {'picture': 'zoom/train/0/7', 'shown': 'own'})
    """

    def __init__(
        self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS, shown: Shown = "own", task: str = TASK
    ) -> None:
        super().__init__(seed, split, rows)
        kinds = {"own": SOURCE, "other": f"{SOURCE}_other_pictures", "blank": f"{SOURCE}_blank_crops"}
        self.shown, self.task, self.source = shown, task, kinds[shown]

    def row(self, place: int) -> dict[str, Any]:
        """The name of a picture, and its digit."""
        name = f"zoom/{self.split}/{self.seed}/{place}"
        row = task_row(self.task, self.source, place, picture=name, shown=self.shown)
        return row | {"reward_model": {"ground_truth": asked_digit(name)}}


class RandomLooks(RowsBySeed):
    """Looks at random places, and the digits that are seen there, as conversations.

    They teach to read a digit, and nothing about where the one that is asked for lies: in their pictures each card has one.

    >>> [message["content"] for message in RandomLooks()[3]["prompt"]][1:]
    ['<image>', 'northeast', '<image>', '1']
    """

    def row(self, place: int) -> dict[str, Any]:
        """A look, and the digit there."""
        name = f"random look/{self.seed}/{place}"
        where = Random(f"{name}/place").choice(list(PLACES))
        messages: list[dict[str, Any]] = [{"role": "system", "content": TASK}]
        for said in (where, str(draw_cards(name)[where].digit)):
            messages += [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": said}]
        images = [draw_part(name, box, all_digits=True) for box in ((0, 0, SIDE, SIDE), box_of(where))]
        return {"prompt": messages, "images": images, "data_source": SOURCE, "index": place}
