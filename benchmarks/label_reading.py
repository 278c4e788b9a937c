"""The first phase of ``benchmarks/learning_starts.py``: a vision tower learns the texts of a drawing and their places.

A model that learns from the answers alone has to find out at once where to look, what a digit looks like and what the question
asks, and stays at random answers for thousands of updates. So the tower learns to read by itself first. Each visual token
predicts, through a linear layer that is dropped afterwards, the text whose middle lies in its part of the picture, or that there
is none. Half of the pictures are of the level, the others are crowded with random texts.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from PIL import Image
from synthetic_figures import Circle, DrawnText, Line, Text, draw_with_texts, random_style
from synthetic_levels import LEVELS, make_problem
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForImageTextToText

from dataproto.transfer import move
from dataproto.vlm import family_of
from dataproto.vlm.family import grid_arguments
from recipes.demo.problems import Split
from rollout.prompts import PromptBuilder
from workers.model.attention import use_packed_attention
from workers.model.packed_model import use_linear_patch_embedding

NO_TEXT = 0.1  # weight of a visual token without a text
SIGNS = "0123456789x°"  # of all texts in drawings; class 0 is "no sign"
LONGEST = {2: 2, 3: 4}
"""Signs of the longest text in the pictures of a level."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Drawing:
    """A picture and its texts."""

    image: Image.Image
    shown: Sequence[DrawnText]


@dataclass(frozen=True)
class LabelledPictures:
    """Pictures of a level, and what each of their visual tokens shows."""

    builder: PromptBuilder
    level: int
    seed: int

    @cached_property
    def cell(self) -> int:
        """Pixels along each side of a visual token's part of a picture."""
        processor = self.builder.image_processor
        return int(processor.patch_size * processor.merge_size)

    def problem(self, place: int, split: Split = "train") -> Drawing:
        """The picture of a problem."""
        problem = make_problem(place, self.level, self.seed, split)
        return Drawing(problem.image, problem.shown)

    def crowd(self, place: int) -> Drawing:
        """Random texts that do not overlap, and lines and circles, some of them across the texts."""
        random, level = Random(f"texts/{self.level}/{self.seed}/{place}"), LEVELS[self.level]
        middle, taken, figure = level.size / 2, list[tuple[float, float, float]](), list[Any]()
        for _ in range(random.randint(0, 5)):
            a, b = (complex(random.uniform(-middle, middle), random.uniform(-middle, middle)) for _ in range(2))
            figure.append(Line(a, a + 0.6 * b) if random.random() < 0.7 else Circle(a, random.uniform(3, 0.4 * middle)))
        for _ in range(8 * (level.size // 56) ** 2):
            text = random_text(random, self.level)
            half = 0.32 * level.font * len(text)
            x, y = random.uniform(half - middle, middle - half), random.uniform(8 - middle, middle - 8)
            if all(abs(x - at) > half + width + 3 or abs(y - height) > level.font + 1 for at, height, width in taken):
                taken.append((x, y, half))
                figure.append(Text(text, complex(x, y)))
        edge = Circle(0j, level.size)  # out of sight, so that the origin is the middle of the picture
        style = random_style(random, turn=0, pen=level.pen, font=level.font)
        return Drawing(*draw_with_texts([edge, *figure], level.size, style, unit=1.0))

    def tensors(self, drawings: Sequence[Drawing]) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels as `as_bytes` has them, grids ``(N, 3)`` and signs ``(F, S)``, 0 after a text, of drawings of one size."""
        builder = self.builder
        made = builder.image_processor(
            images=[each.image for each in drawings], return_tensors="pt", **builder.image_options
        )
        grids = made["image_grid_thw"]
        cells = (grids[0, 1:] // builder.image_processor.merge_size).tolist()
        signs = torch.zeros(len(drawings), *cells, LONGEST[self.level], dtype=torch.int64)
        for number, drawing in enumerate(drawings):
            scale = cells[0] / LEVELS[self.level].size
            for text in drawing.shown:
                row, column = (min(int(scale * place), last - 1) for place, last in zip((text.y, text.x), cells))
                known = [SIGNS.index(sign) + 1 for sign in text.text[: LONGEST[self.level]]]
                signs[number, row, column] = torch.tensor(known + [0] * (LONGEST[self.level] - len(known)))
        return as_bytes(made["pixel_values"]), grids, signs.flatten(0, 2)


def random_text(random: Random, level: int) -> str:
    """A text of a kind that the pictures of a level have, with any number."""
    number = str(random.randint(1, 99 if level == 2 else 139))
    if level == 2:
        return number
    return random.choice([number, number, f"{number}°", "x"])


def as_bytes(pixels: Tensor) -> Tensor:
    """Pixels ``(patches, 6 P^2)`` of an image processor with mean 1 and deviation 0.5 as ``(patches, 3, P^2)`` uint8: one of the
    two equal frames that a tower sees. That is an eighth of the bytes, and sent from process to process in less than an update.
    """
    frames = pixels.unflatten(1, (3, 2, -1))[:, :, 0]
    return (frames / 2 + 1).mul(255).round().to(torch.uint8)


def from_bytes(shown: Tensor) -> Tensor:
    """The pixels of which `as_bytes` made ``shown``.

    >>> pixels = torch.tensor([[0.0, -2.0]]).repeat(1, 6)
    >>> torch.equal(from_bytes(as_bytes(pixels)), pixels)
    True
    """
    frames = (shown.float() / 255 - 1) * 2
    return frames[:, :, None].expand(-1, -1, 2, -1).flatten(1)


class ReadingBatches(Dataset[Any]):
    """Batches of pictures to read, half of them crowded; each is made where it is read."""

    def __init__(self, pictures: LabelledPictures, size: int) -> None:
        self.pictures, self.size = pictures, size

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        places = range(number * self.size, (number + 1) * self.size)
        kinds = (self.pictures.problem, self.pictures.crowd)
        made = self.pictures.tensors([kinds[place % 2](place) for place in places])
        return tuple(tensor.numpy() for tensor in made)


def in_processes(batches: Dataset[Any], workers: int) -> Iterator[Any]:
    """All batches in order, made ahead by worker processes, which begin at once; 0: by this process, when they are read.

    Batches of arrays come through pipes, tensors would through shared memory, of which containers often have little.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or each process warns that it was forked
    ahead: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
    return iter(DataLoader(batches, batch_size=None, sampler=count(), collate_fn=_unchanged, **ahead))  # type: ignore[arg-type]


def _unchanged(batch: Any) -> Any:
    return batch


def as_tensors(arrays: Sequence[Any]) -> tuple[Tensor, ...]:
    """Arrays of another process as tensors."""
    return tuple(map(torch.from_numpy, arrays))


def one_ahead(made: Iterator[Item], change: Callable[[Item], Any]) -> Iterator[Any]:
    """What ``change`` makes of each, with the next one made by a thread while the last one is used."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: change(next(made)))
        while True:
            ready = waiting.result()
            waiting = thread.submit(lambda: change(next(made)))
            yield ready


class Reader(nn.Module):
    """A model's tower and the linear layer that tells the signs of each visual token."""

    def __init__(self, model: Any, signs: int) -> None:
        super().__init__()
        self.family = family_of(model.config)
        use_packed_attention(model)
        use_linear_patch_embedding(model)
        self.tower = model.get_submodule(str(self.family.vision_tower))
        self.model = [model]  # no submodule: only the tower is trained
        self.head = nn.Linear(model.config.get_text_config().hidden_size, signs * (len(SIGNS) + 1))
        self.signs = signs
        self.grids: Tensor | None = None  # the last ones, and what the tower computes from them
        self.placed: dict[str, Any] = {}

    def forward(self, shown: Tensor, grids: Tensor) -> Tensor:
        """Logits ``(F, S, signs + 1)``."""
        device = self.head.weight.device
        if self.grids is None or not torch.equal(self.grids, grids):
            found = grid_arguments(self.tower, grids)
            self.placed = {name: move(x, device) if isinstance(x, Tensor) else x for name, x in found.items()}
            self.placed["image_grid_thw"], self.grids = move(grids, device), grids
        others = dict(self.placed)
        media = {"pixel_values": from_bytes(move(shown, device)), "image_grid_thw": others.pop("image_grid_thw")}
        features = self.family.features(self.model[0], media, **others)[:, 0]
        return self.head(features).unflatten(1, (self.signs, -1))  # type: ignore[no-any-return]


def reading_loss(logits: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy, in which visual tokens without a text weigh less, and the share of texts that are read wholly."""
    shown = signs[:, 0] > 0
    weights = torch.where(shown, 1.0, NO_TEXT)
    losses = cross_entropy(logits.transpose(1, 2), signs, reduction="none").mean(1)
    right = (logits.argmax(-1) == signs).all(1)
    return (losses * weights).sum() / weights.sum(), right[shown].float().mean()


def learn_to_read(
    path: Path,
    batches: Iterator[Any],
    held_out: tuple[Tensor, Tensor, Tensor],
    lr: float,
    until: float,
    seconds: float,
    every: int,
) -> float:
    """Trains the tower of the checkpoint at ``path``, in place, until it reads so many held-out texts or the time is over.

    Returns:
        The share of held-out texts that it reads.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = one_ahead(batches, as_tensors)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).to(device)
    reader = Reader(model, held_out[2].shape[1]).to(device)
    weights = list(reader.parameters())
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    began, read = time.monotonic(), 0.0
    for update, (shown, grids, signs) in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, update / 100)
        loss, _ = reading_loss(reader(shown, grids), move(signs, device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        over = time.monotonic() - began > seconds
        if over or not update % every:
            with torch.no_grad():
                read = float(reading_loss(reader(*held_out[:2]), move(held_out[2], device))[1])
            spent = f"reading, {update} updates, {time.monotonic() - began:.0f} s"
            print(f"{spent}: loss {float(loss.detach()):.4f}, texts read {read:.3f}", flush=True)
            if over or read >= until:
                break
    model.cpu().save_pretrained(path)
    return read
