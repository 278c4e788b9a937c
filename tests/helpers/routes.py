"""Recorded experts for rows of tests."""

import torch

from dataproto import RaggedTensor
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS


def with_routes(config, data, seed=0, layers=2):
    """The rows with other experts than a router would choose, drawn at random; rows of equal prompts share theirs."""
    text, generator = config.get_text_config(), torch.Generator().manual_seed(seed)

    def draw(tokens):
        shares = torch.rand(int(tokens), layers, text.num_experts, generator=generator)
        return shares.topk(text.num_experts_per_tok, dim=-1).indices.to(torch.uint8)

    attended, width = data["attention_mask"], data["response_mask"].shape[1]
    prompts: dict[tuple[int, ...], torch.Tensor] = {}
    rows = []
    for ids, mask in zip(data["input_ids"], attended[:, : attended.shape[1] - width], strict=True):
        key = tuple(ids[: len(mask)][mask.bool()].tolist())
        if key not in prompts:
            prompts[key] = draw(len(key))
        rows.append(prompts[key])
    recorded = data[:]
    recorded[PROMPT_ROUTED_EXPERTS] = RaggedTensor.from_list(rows)
    responses = attended[:, attended.shape[1] - width :].sum(1)
    recorded[ROUTED_EXPERTS] = RaggedTensor.from_list([draw(count) for count in responses])
    return recorded


def routes_of(data, row):
    """The experts ``(n, M, k)`` of all tokens of a row."""
    return torch.cat([data[PROMPT_ROUTED_EXPERTS][row], data[ROUTED_EXPERTS][row]])
