"""A recipe of one's own: RLOO (arXiv:2402.14740) that teaches a model to name the colour of a picture in one word.

    python docs/custom_recipe.py CHECKPOINT [STEPS]

Data, reward, advantage and losses are plain functions; the roles run wherever `launch` puts them. The model first learns the
form of an answer, from random ones, and then from its own samples which answer is right.
"""

import random
import sys

from PIL import Image

from recipes.run.supervised import next_token_loss
from rollout import SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import ActorConfig, OptimizerConfig, launch

COLOURS = ("red", "green", "blue")
PROMPTS, SAMPLES = 16, 16  # of a step, of a prompt
WARM_UP, ENTROPY = 100, 0.01  # steps; weight of the entropy while no answer is right


def problems(rng, answered=False):
    """Rows: messages with an ``<image>`` marker, the images, what the reward needs to know; or with an answer, a random one."""
    for colour in rng.choices(COLOURS, k=PROMPTS):
        messages = [{"role": "user", "content": "<image>Which colour?"}]
        messages += [{"role": "assistant", "content": rng.choice(COLOURS)}] if answered else []
        image = Image.new("RGB", (56, 56), colour)
        yield {"prompt": messages, "images": [image], "reward_model": {"ground_truth": colour}}


def reward(rows):
    """One for the right name and nothing else, so that the mean is the share of colours named."""
    return [{"score": float(row.solution_str == row.ground_truth)} for row in rows]


def leave_one_out(rewards, mask):
    """Each sample's reward less the mean of its prompt's other samples, on all of its tokens: ``(B, R)``."""
    scores = rewards.sum(1).view(-1, SAMPLES)
    baseline = (scores.sum(1, keepdim=True) - scores) / (SAMPLES - 1)
    return (scores - baseline).view(-1, 1) * mask


def reinforce(outputs, data):
    """The loss of each token ``(B, R)``, and metrics of the same shape; masking and averaging are the worker's."""
    return -outputs.log_probs * data["advantages"] - data["bonus"] * outputs.entropy, {"actor/entropy": outputs.entropy}


def main(checkpoint, steps=100, seed=0):
    prompts, conversations = (kind.from_pretrained(checkpoint, 256) for kind in (PromptBuilder, SupervisedBuilder))
    rng, sampling = random.Random(seed), SamplingParams(n=SAMPLES, max_tokens=8, seed=seed)
    actor = ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95)))
    with launch(actor=actor, reward=reward, rollout="hf") as roles:
        for _ in range(WARM_UP):
            roles.actor.update(conversations(list(problems(rng, answered=True))), next_token_loss)
        for step in range(steps):
            roles.sync_weights()
            data = roles.rollout.generate(prompts(list(problems(rng))), sampling)
            data |= roles.reward.score(data)
            named = sum(data["score"]) / len(data)
            data["advantages"] = leave_one_out(data["token_level_rewards"], data["response_mask"])
            data["bonus"] = ENTROPY * (1 - named) * data["response_mask"]  # fades as answers become right
            metrics = roles.actor.update(data, reinforce, aggregation="seq-mean-token-mean", entropy=True)
            print(f"step {step}: named {named:.3f}, entropy {metrics['actor/entropy']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
