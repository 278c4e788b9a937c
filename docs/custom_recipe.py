"""A recipe of one's own: RLOO (arXiv:2402.14740) that teaches a model to name the colour of a picture in one word.

    python docs/custom_recipe.py CHECKPOINT [STEPS]

Data, reward, advantage and loss are plain functions; the roles run wherever `launch` puts them.
"""

import random
import sys

import torch
from PIL import Image

from rollout import SamplingParams
from rollout.prompts import PromptBuilder
from workers import ActorConfig, OptimizerConfig, launch

COLOURS = ("red", "green", "blue", "yellow")
SAMPLES = 8


def problems(step, count):
    """Rows: a prompt with an ``<image>`` marker, its images, and what the reward needs to know."""
    rng = random.Random(step)
    for number in range(count):
        colour = rng.choice(COLOURS)
        yield {
            "prompt": "<image>Which colour is this?",
            "images": [Image.new("RGB", (56, 56), colour)],
            "reward_model": {"ground_truth": colour},
            "uid": f"{step}-{number}",
        }


def reward(rows):
    """One for naming the colour, less a little for each further character, so that brevity pays from the first step."""
    return [{"score": (row.ground_truth in row.solution_str) - 0.02 * len(row.solution_str)} for row in rows]


def leave_one_out(rewards, mask):
    """Each sample's reward less the mean of its prompt's other samples, on all of its tokens: ``(B, R)``."""
    scores = rewards.sum(1).view(-1, SAMPLES)
    baseline = (scores.sum(1, keepdim=True) - scores) / (SAMPLES - 1)
    return (scores - baseline).view(-1, 1) * mask


def reinforce(outputs, data):
    """The loss of each token ``(B, R)``, and metrics of the same shape; masking and averaging are the worker's."""
    return -outputs.log_probs * data["advantages"], {"actor/entropy": outputs.entropy}


def main(checkpoint, steps=30):
    build = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=256)
    sampling = SamplingParams(n=SAMPLES, max_tokens=8)
    actor = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3))
    with launch(actor=actor, reward=reward, rollout="hf") as roles:
        for step in range(steps):
            data = roles.rollout.generate(build(list(problems(step, count=8))), sampling)
            data |= roles.reward.score(data)
            data["advantages"] = leave_one_out(data["token_level_rewards"], data["response_mask"])
            metrics = roles.actor.update(data, reinforce, aggregation="seq-mean-token-mean", entropy=True)
            roles.sync_weights()
            score = torch.tensor(data["score"].tolist()).mean()
            print(f"step {step}: reward {score:.3f}, entropy {metrics['actor/entropy']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
