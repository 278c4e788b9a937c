"""A recipe of your own: RLOO (arXiv:2402.14740) teaches a model to name the colour of a picture in one word.

    python docs/custom_recipe.py CHECKPOINT DIRECTORY [STEPS]        # the same command continues an interrupted run

`train` adds evaluation, metrics, checkpoints and resume. The model first learns the form of an answer, then which one is right.
"""

import random
import sys
from pathlib import Path

from PIL import Image

from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.run import RunConfig, greedy_evaluation, next_token_loss, recorded_run, train
from rollout import SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import ActorConfig, OptimizerConfig, launch

COLOURS = ("red", "green", "blue")
PROMPTS, SAMPLES, TOKENS = 16, 16, 8  # of a step, a prompt, a sample
WARM_UP, ENTROPY = 100, 0.01  # steps; weight of the entropy while no answer is right


def problem(seed, answer=()):
    """A row: messages with an ``<image>`` marker, the images, and the truth for the reward."""
    colour = random.Random(seed).choice(COLOURS)
    messages, image = [{"role": "user", "content": "<image>Which colour?"}, *answer], Image.new("RGB", (56, 56), colour)
    return {"prompt": messages, "images": [image], "reward_model": {"ground_truth": colour}, "data_source": "colours"}


def reward(rows):
    return [{"score": float(row.solution_str == row.ground_truth)} for row in rows]  # 1 for the right name alone


def rloo_step(roles, prompts):
    data = roles.rollout.generate(prompts, SamplingParams(n=SAMPLES, max_tokens=TOKENS))
    data |= roles.reward.score(data)
    scores, mask = data["token_level_rewards"].sum(1).view(-1, SAMPLES), data["response_mask"]
    others = (scores.sum(1, keepdim=True) - scores) / (SAMPLES - 1)  # the mean of the prompt's other samples
    data["advantages"] = (scores - others).view(-1, 1) * mask  # (B, R)
    data["bonus"] = ENTROPY * (1 - scores.mean()) * mask  # fades as answers become right
    metrics = roles.actor.update(data, reinforce, aggregation="seq-mean-token-mean", entropy=True)
    roles.sync_weights()
    return data, metrics


def reinforce(outputs, data):
    """The loss of each token ``(B, R)``, and metrics of the same shape; the worker masks and averages both."""
    return -outputs.log_probs * data["advantages"] - data["bonus"] * outputs.entropy, {"actor/entropy": outputs.entropy}


def main(checkpoint, directory, steps=100):
    run = RunConfig(steps=int(steps), eval_every=50, save_every=50, output_dir=Path(directory), resume=True)
    builder, conversations = (kind.from_pretrained(checkpoint, 256) for kind in (PromptBuilder, SupervisedBuilder))
    loader = PromptLoader([problem(number) for number in range(1024)], builder, PROMPTS)
    held_out = EvaluationLoader([problem(number) for number in range(2000, 2064)], builder, batch_size=64)
    rng, actor = random.Random(0), ActorConfig(checkpoint, optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95)))
    with recorded_run(run), launch(actor=actor, reward=reward) as roles:  # writes report.html at the end
        for _ in range(0 if [*run.output_dir.glob("global_step_*")] else WARM_UP):
            answers = [[{"role": "assistant", "content": word}] for word in rng.choices(COLOURS, k=PROMPTS)]
            roles.actor.update(conversations([problem(rng.random(), answer) for answer in answers]), next_token_loss)
        roles.sync_weights()
        train(run, roles, loader, rloo_step, greedy_evaluation(held_out, TOKENS, run.output_dir), builder)


if __name__ == "__main__":
    main(*sys.argv[1:])
