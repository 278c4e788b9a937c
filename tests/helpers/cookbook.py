"""A working directory in which the Tinker cookbook runs offline: folders whose relative paths look like names of a hub."""

import random
import shutil
from pathlib import Path

import datasets
from PIL import Image, ImageDraw

from recipes.demo.tiny_model import make_tiny_model

TEXT_NAME, VISION_NAME = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-VL-30B-A3B-Instruct"  # which the cookbook knows
CLASSES = {"circle": "red", "square": "blue", "triangle": "green", "cross": "orange"}
WORDS = [
    "the",
    "a",
    "circle",
    "square",
    "triangle",
    "red",
    "blue",
    "green",
    "is",
    "of",
    "and",
    "with",
    "look",
    "answer",
    "number",
    "what",
    "colour",
    "shape",
]


def make_working_directory(path: Path) -> dict[str, str]:
    """Fills a directory, and returns the paths of its models by their names."""
    texts = [sentence(random.Random(seed)) for seed in range(200)] + [f"This is a {name}" for name in CLASSES]
    model = make_tiny_model(path / "tiny", texts=texts)
    for name in (TEXT_NAME, VISION_NAME):
        shutil.copytree(model, path / name)
    write_no_robots(path / "HuggingFaceH4/no_robots/data")
    write_preferences(path / "Anthropic/hh-rlhf/data")
    write_pictures(path / "dpdl-benchmark/caltech101/data")
    return {name: str(model) for name in (TEXT_NAME, VISION_NAME)}


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 8)))


def write_no_robots(path: Path) -> None:
    """Conversations in which the answer repeats the question."""
    path.mkdir(parents=True)
    texts = [sentence(random.Random(seed)) for seed in range(320)]
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    datasets.Dataset.from_dict({"messages": rows}).to_parquet(path / "train-00000-of-00001.parquet")


def write_preferences(path: Path) -> None:
    """Pairs of which the better answer always begins in the same way."""
    path.mkdir(parents=True)
    for split, count in (("train", 200), ("test", 32)):
        texts = [sentence(random.Random(f"{split}{number}")) for number in range(count)]
        good = [f"\n\nHuman: {text}\n\nAssistant: the answer is {text}" for text in texts]
        bad = [f"\n\nHuman: {text}\n\nAssistant: look look look" for text in texts]
        datasets.Dataset.from_dict({"chosen": good, "rejected": bad}).to_parquet(
            path / f"{split}-00000-of-00001.parquet"
        )


def write_pictures(path: Path) -> None:
    """Drawn shapes, which are the same when they are mirrored."""
    path.mkdir(parents=True)
    names = list(CLASSES)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    for split, count in (("train", 320), ("test", 80)):
        draw = random.Random(split)
        labels = [number % len(names) for number in range(count)]
        rows = {"image": [picture(names[label], draw) for label in labels], "label": labels}
        datasets.Dataset.from_dict(rows, features).to_parquet(path / f"{split}-00000-of-00001.parquet")


def picture(name: str, draw: random.Random) -> Image.Image:
    """A shape of its class's colour somewhere on white paper."""
    image = Image.new("RGB", (84, 84), "white")
    pen, colour = ImageDraw.Draw(image), CLASSES[name]
    size = draw.randint(16, 26)
    x, y = (draw.randint(size, 84 - size) for _ in range(2))
    box = (x - size, y - size, x + size, y + size)
    if name == "circle":
        pen.ellipse(box, fill=colour)
    elif name == "square":
        pen.rectangle(box, fill=colour)
    elif name == "triangle":
        pen.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=colour)
    else:
        pen.line((x - size, y, x + size, y), fill=colour, width=9)
        pen.line((x, y - size, x, y + size), fill=colour, width=9)
    return image
