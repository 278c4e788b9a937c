"""Training step by step: rows whose targets are all scored, and the results of passes over them."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.ragged import RaggedTensor
from workers.model.packed_model import Outputs, PackedVLM
from workers.training.forward_pass import LossFn, token_types

LOSS_SUM = "loss:sum"
OWN_MASK = "_own_response_mask"  # where a batch keeps its response_mask while all targets are scored


@dataclass(frozen=True)
class PassOutput:
    """The result of a pass over rows.

    ``metrics`` are sums over tokens of all rows, with the loss as ``loss:sum``. ``log_probs (B, R)`` float32, if asked for,
    are 0 for targets without one (see `scored_targets`).
    """

    metrics: Mapping[str, float]
    log_probs: Tensor | None = None


def join_passes(results: Sequence[PassOutput]) -> PassOutput:
    """The ranks' rows one after the other; every rank has the same metrics."""
    parts = [result.log_probs for result in results if result.log_probs is not None and len(result.log_probs)]
    return PassOutput(results[0].metrics, torch.cat(parts) if parts else results[0].log_probs)


def join_tensors(results: Sequence[Tensor]) -> Tensor:
    """The ranks' rows one after the other."""
    return torch.cat(list(results))


def scored_targets(data: DataProto, module: PackedVLM) -> Tensor:
    """``(B, R)`` int64: 1 on targets that have a log-prob under the policy.

    These follow another token, are in the vocabulary, and are neither placeholders of media nor their delimiters.
    """
    attended, width = data["attention_mask"].bool(), data["response_mask"].shape[1]
    behind = attended & (attended.cumsum(1) > 1)
    response = slice(attended.shape[1] - width, None)
    targets = data["targets"] if "targets" in data else data["input_ids"][:, response]
    vocabulary = module.model.config.get_text_config().vocab_size
    banned = torch.isin(targets, torch.tensor(module.banned_ids, dtype=targets.dtype))
    return (behind[:, response] & (targets >= 0) & (targets < vocabulary) & ~banned).to(torch.int64)


def every_target(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with `scored_targets` as ``response_mask``; their original mask is kept for `own_targets`."""
    rows = copy(data)
    rows[OWN_MASK] = data["response_mask"]
    rows["response_mask"] = scored_targets(data, module)
    return rows


def own_targets(loss_fn: LossFn) -> LossFn:
    """The loss function for rows of `every_target`, which gets the rows' original mask and only the log-probs under it."""

    def own(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        mask, rows = rows[OWN_MASK], copy(rows)
        rows.pop([OWN_MASK])
        rows["response_mask"] = mask
        return loss_fn(replace(outputs, log_probs=outputs.log_probs.where(mask != 0, 0.0)), rows)

    return own


def every_token(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with all tokens except the first as responses, R = L - 1; ``response_mask`` is 1 wherever there is a log-prob."""
    rows, ids = copy(data), data["input_ids"]
    if "targets" in rows:
        rows.pop(["targets"])
    if "response_mask" not in rows:
        rows["response_mask"] = ids[:, :0]
    if PROMPT_ROUTED_EXPERTS in rows and ROUTED_EXPERTS in rows:
        rows[PROMPT_ROUTED_EXPERTS], rows[ROUTED_EXPERTS] = _split_at_first(rows)
    rows["mm_token_type_ids"] = token_types(module, rows)
    rows["response_mask"] = torch.zeros_like(ids[:, 1:])
    rows["response_mask"] = scored_targets(rows, module)
    return rows


def _split_at_first(rows: DataProto) -> tuple[RaggedTensor, RaggedTensor]:
    """The recorded experts of what `every_token` makes the prompt, the first place of a row, and of all others."""
    firsts, others = [], []
    for row, first in enumerate(rows["attention_mask"][:, 0].bool().tolist()):
        experts = torch.cat([rows[PROMPT_ROUTED_EXPERTS][row], rows[ROUTED_EXPERTS][row]])
        firsts.append(experts[: int(first)])
        others.append(experts[int(first) :])
    return RaggedTensor.from_list(firsts), RaggedTensor.from_list(others)
