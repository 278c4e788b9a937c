"""A batch as verl's trainer has it before the advantages, and the reward and tokenizer that go with it."""

from typing import Any

import numpy as np
import torch


def rollouts(rows: int = 8) -> Any:
    """Columns as verl's trainer has them before the advantages, from a fixed seed."""
    from verl import DataProto

    draw = torch.Generator().manual_seed(7)
    mask = (torch.arange(6) < torch.tensor([3, 6, 1, 4, 5, 2, 6, 3]).repeat(rows // 8 + 1)[:rows, None]).long()
    prompt_mask = (torch.arange(4) >= torch.tensor([0, 2, 1, 3]).repeat(rows // 4 + 1)[:rows, None]).long()
    scores = torch.zeros(rows, 6).scatter(1, mask.sum(1, keepdim=True) - 1, torch.rand(rows, 1, generator=draw))
    tensors = {
        "prompts": torch.randint(5, 90, (rows, 4), generator=draw) * prompt_mask,
        "responses": torch.randint(5, 90, (rows, 6), generator=draw) * mask,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        **{
            name: -torch.rand(rows, 6, generator=draw)
            for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "entropys")
        },
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    tensors["reward_baselines"] = torch.rand(rows, generator=draw)
    rewards = [{"style": "rule", "ground_truth": str(row)} for row in range(rows)]
    arrays = {
        "uid": np.array([f"p{row // 2}" for row in range(rows)], dtype=object),
        "data_source": np.array(["geo3k"] * rows, dtype=object),
        "reward_model": np.array(rewards, dtype=object),
        "extra_info": np.array([{"index": row} for row in range(rows)], dtype=object),
    }
    return DataProto.from_dict(tensors, arrays, {"temperature": 1.0, "global_token_num": [1] * rows})


class Letters:
    """What a reward manager asks of a tokenizer."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(each)) for each in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


def score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> dict[str, float]:
    return {"score": len(solution_str) / 10 + int(ground_truth), "acc": float(len(solution_str) % 2)}


def plain_score(*args: Any, **kwargs: Any) -> float:
    return 0.5
