"""Run directories with metrics and kept rollouts, as training writes them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dataproto import DataProto
from helpers.tiny_prompts import tiny_tokenizer
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.rollout_files import read_lines, rows_file

COLOURS = ("red", "green", "blue", "orange", "purple", "black", "gray", "cyan")


def load_kept(directory, step) -> list[dict]:
    return read_lines(rows_file(directory, step), "uid")


def objects(values) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def scored_batch(texts, rewards, uids, width=None, side=64) -> DataProto:
    """Scored rollouts with these responses: engine's log-probs -0.1, -0.2, ..., the actor's 0.25 above in odd places."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.encode(text) for text in texts]
    width = width or max(map(len, ids))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    prompts = torch.ones(len(texts), 3, dtype=torch.long)
    engine = (-0.1 * torch.arange(1, width + 1)).expand(len(texts), -1) * mask
    pictures = {
        uid: Image.new("RGB", (side, side), COLOURS[index % 8]) for index, uid in enumerate(dict.fromkeys(uids))
    }
    scores = torch.tensor(rewards, dtype=torch.float32)
    last = mask.cumsum(1).eq(mask.sum(1, keepdim=True)) & mask.bool()
    return DataProto.from_dict(
        {
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([prompts, mask], 1),
            "rollout_log_probs": engine,
            "old_log_probs": engine + 0.25 * (torch.arange(width) % 2) * mask,
            "token_level_rewards": scores[:, None] * last,
            "advantages": (scores - scores.mean())[:, None] * mask,
            "truncated": mask.sum(1) == width,
        },
        non_tensors={
            "uid": objects(uids),
            "response_text": objects(texts),
            "score": objects(rewards),
            "acc": objects([float(reward > 0.5) for reward in rewards]),
            "format": objects([1.0] * len(texts)),
            "index": objects(list(range(len(texts)))),
            "raw_prompt": objects([[{"role": "user", "content": f"<image>Which colour, {uid}?"}] for uid in uids]),
            "reward_model": objects([{"ground_truth": "red"}] * len(texts)),
            "multi_modal_data": objects([{"image": [pictures[uid]]} for uid in uids]),
        },
    )


def write_run(directory: Path, steps: int = 3, groups: int = 2, samples: int = 4) -> Path:
    """A run with metrics, and with rollouts whose rewards, lengths and texts differ."""
    kept = KeptRollouts(directory, groups * samples, tiny_tokenizer())
    with MetricsLog(directory) as log:
        for step in range(1, steps + 1):
            texts, rewards, uids = [], [], []
            for row in range(groups * samples):
                texts.append(f"The colour is {COLOURS[(row + step) % 8]}" + "!" * (row % samples))
                rewards.append((row * 3 + step) % (samples + 1) / samples)
                uids.append(f"prompt-{row // samples}")
            kept.keep(step, scored_batch(texts, rewards, uids))
            log.log(step, {"critic/score/mean": sum(rewards) / len(rewards), "timing_s/step": 1.0})
    return directory
