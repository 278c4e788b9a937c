"""What is in a picture reaches the words: a tiny model, taught the names of colours on some shades, names them on others."""

from random import Random

import pytest
import torch
from PIL import Image

from recipes.demo.tiny_model import answered_rows, make_tiny_model, next_token_loss
from rollout.prompts import PromptBuilder
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 50, 220),
    "yellow": (235, 225, 30),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
}


def picture(colour: str, random: Random) -> Image.Image:
    """One colour all over, of a shade of its own."""
    shade = tuple(min(max(value + random.randint(-12, 12), 0), 255) for value in COLOURS[colour])
    return Image.new("RGB", (56, 56), shade)


def prompts(builder, colours, random):
    return builder([{"prompt": "<image>Which colour is it?", "images": [picture(c, random)]} for c in colours])


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "adamw",
        pytest.param("muon", marks=pytest.mark.long),
        pytest.param("adamw8bit", marks=(pytest.mark.long, pytest.mark.torchao)),
    ],
)
def test_the_right_word_comes_first(tmp_path, kind):
    words = sorted(COLOURS)
    builder = PromptBuilder.from_pretrained(make_tiny_model(tmp_path / "model", seed=1), max_prompt_length=128)
    random, steps = Random(0), 60
    schedule = OptimizerConfig(lr=2e-3, kind=kind, schedule="linear", warmup_steps=5, total_steps=steps)
    actor = ActorWorker(ActorConfig(str(tmp_path / "model"), optimizer=schedule), CPU)
    for _ in range(steps):
        chosen = [random.choice(words) for _ in range(24)]
        actor.update(answered_rows(builder, prompts(builder, chosen, random), chosen), next_token_loss)

    held_out = prompts(builder, words, Random(1))
    rows = answered_rows(builder, held_out.repeat(len(words)), [word for _ in words for word in words])
    scores = actor.log_probs(rows)["old_log_probs"].sum(1).view(len(words), len(words))  # (picture, word)
    assert [words[best] for best in scores.argmax(1).tolist()] == words
    # The picture decides, and nothing else: rows of one picture are those of the other once the pictures are swapped.
    media = held_out["multi_modal_inputs"]
    media[0], media[1] = media[1], media[0]
    swapped = actor.log_probs(answered_rows(builder, held_out[:2].repeat(2), words[:2] * 2))["old_log_probs"].sum(1)
    torch.testing.assert_close(swapped.view(2, 2), scores[[1, 0], :2], atol=1e-4, rtol=0)
