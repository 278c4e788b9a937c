"""Rows of prompts to requests, and completions to columns."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.collation import pad_rows, ragged_rows
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS, require
from dataproto.errors import InvalidRow, RequestFailed, RowCountMismatch
from dataproto.packing import MAX_TOKENS, PAD_TOKEN
from dataproto.planning import places_in_groups
from dataproto.ragged import RaggedTensor
from dataproto.vlm import VLMFamily
from rollout.engine import FINISH_REASONS, Completion, Request, SamplingParams, row_name
from rollout.sampling import derive_seed

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
OCCURRENCE = "_occurrence"
"""The column with the number of rows of the same ``uid`` that precede a row in the whole batch."""


def number_occurrences(prompts: DataProto, earlier: Sequence[str] = ()) -> DataProto:
    """A new batch of the same rows with the column `OCCURRENCE`. Without uids it numbers the rows of the batch.

    Args:
        earlier: `prompt_names` of the rows that precede these in the whole batch.

    >>> rows = DataProto.from_dict(non_tensors={"uid": ["a", "b", "a"]})
    >>> number_occurrences(rows)[OCCURRENCE].tolist(), number_occurrences(rows, earlier=["a"])[OCCURRENCE].tolist()
    ([0, 0, 1], [1, 0, 2])
    """
    numbered = prompts[:]
    numbered[OCCURRENCE] = places_in_groups([*earlier, *prompt_names(prompts)])[len(earlier) :]
    return numbered


def prompt_names(prompts: DataProto) -> list[str]:
    """The uid of each prompt, or empty strings if there are none."""
    return [str(uid) for uid in prompts["uid"]] if "uid" in prompts else [""] * len(prompts)


def build_requests(prompts: DataProto, sampling: SamplingParams, call: int = 0) -> list[Request]:
    """``n`` consecutive requests for each row of prompts. The samples of a prompt share its tensors, and so do rows with the same
    tokens that follow each other, such as samples of a prompt that continue later.

    Each sample's random stream derives from (sampling.seed, the row's ``uid``, the sample's number). Samples are numbered across
    all rows of a uid, so that ``prompts.repeat(n)`` with one sample each draws the same as ``prompts`` with ``n``. Without uids
    the stream derives from the number of the row in the batch and of the ``call``.
    """
    require(prompts, *PROMPT_COLUMNS)
    occurrences = (prompts if OCCURRENCE in prompts else number_occurrences(prompts))[OCCURRENCE]
    source: tuple[int | str, ...] = (sampling.seed,) if "uid" in prompts else (sampling.seed, "call", call)
    attended = prompts["attention_mask"].bool()
    types = prompts["mm_token_type_ids"] if "mm_token_type_ids" in prompts else torch.zeros_like(prompts["input_ids"])
    names = prompt_names(prompts)

    def column(name: str, absent: Any) -> Any:
        return prompts[name] if name in prompts else [absent] * len(prompts)

    raw, data, inputs = column("raw_prompt_ids", ()), column("multi_modal_data", {}), column("multi_modal_inputs", {})
    requests: list[Request] = []
    for row in range(len(prompts)):
        mask, first = attended[row], int(occurrences[row]) * sampling.n
        tensors = (prompts["input_ids"][row, mask], types[row, mask], prompts["position_ids"][row][..., mask])
        if requests:  # media tell prompts apart that have the same tokens
            before = requests[-1].input_ids, requests[-1].token_types, requests[-1].position_ids
            tensors = before if all(map(torch.equal, tensors, before)) else tensors
        requests += [
            Request(raw[row], *tensors, data[row], inputs[row], derive_seed(*source, names[row], sample), names[row])
            for sample in range(first, first + sampling.n)
        ]
    return requests


def attach_responses(
    prompts: DataProto,
    completions: Iterable[Completion],
    sampling: SamplingParams,
    family: VLMFamily,
    pad_token_id: int,
) -> DataProto:
    """The rollout batch: ``len(prompts) * n`` rows with prompt and response columns (see `dataproto.columns`).

    R is the length of the longest response. Log-probs of the prompt and of the likeliest tokens are columns if ``sampling`` asks
    for them. ``meta_info`` holds ``max_tokens`` (see `dataproto.packing`).

    Raises:
        RowCountMismatch: a request has no completion, or two; names the row.
        RequestFailed: a completion ended neither with an end token nor at ``max_tokens``; names the row.
        InvalidRow: a completion has no experts, or not those of all its tokens, while others have theirs.
    """
    ordered = order_completions(completions, prompts, sampling)
    width = max((len(completion.token_ids) for completion in ordered), default=0) or 1
    responses, response_mask, log_probs = collate_responses(ordered, width, pad_token_id)
    data = prompts.repeat(sampling.n, interleave=True)
    prompt_ids, prompt_mask = data["input_ids"], data["attention_mask"]
    positions = family.extend_positions(data["position_ids"], prompt_mask, width)
    data["prompts"] = prompt_ids
    data["responses"] = responses
    data["input_ids"] = torch.cat([prompt_ids, responses], dim=1)
    data["attention_mask"] = torch.cat([prompt_mask, response_mask.to(prompt_mask.dtype)], dim=1)
    data["position_ids"] = torch.cat([data["position_ids"], positions], dim=-1)
    if "mm_token_type_ids" in data:
        types = data["mm_token_type_ids"]
        data["mm_token_type_ids"] = torch.cat([types, types.new_zeros(responses.shape)], dim=1)
    data["response_mask"] = response_mask
    data["rollout_log_probs"] = log_probs
    data["truncated"] = torch.tensor([each.finish_reason == "length" for each in ordered], dtype=torch.bool)
    if any(each.routed_experts is not None for each in ordered):
        experts, lengths = [each.routed_experts for each in ordered], [len(each.token_ids) for each in ordered]
        owners = [place // sampling.n for place in range(len(ordered))]  # samples of a prompt share its experts
        data[PROMPT_ROUTED_EXPERTS], data[ROUTED_EXPERTS] = expert_columns(
            experts, prompt_mask.sum(1).tolist(), lengths, owners
        )
    if ordered and all(each.drafted_tokens is not None for each in ordered):
        for name in ("drafted_tokens", "accepted_tokens"):
            data[name] = torch.tensor([getattr(each, name) for each in ordered], dtype=torch.int64)
    if sampling.top_log_probs:
        data["top_log_probs"] = object_array([completion.top_log_probs for completion in ordered])
    data.meta_info |= {MAX_TOKENS: sampling.max_tokens, PAD_TOKEN: pad_token_id}
    return data


def expert_columns(
    rows: Sequence[Tensor | None],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    owners: Sequence[Hashable],
) -> tuple[RaggedTensor, RaggedTensor]:
    """The experts of the prompt tokens, and of the tokens after the prompt, of whole rows.

    Args:
        rows: the experts ``(n, M, k)`` of each row's tokens, of all or all but the last, which the engine did not read: it
            repeats those of the one before, and no log-prob depends on them.
        owners: equal for rows of the same prompt, which all get those of the first such row: prompts are computed once in
            training.

    Raises:
        InvalidRow: the experts of some tokens are not known.

    >>> columns = expert_columns([torch.tensor([[[3]], [[1]]]), torch.tensor([[[2]], [[0]]])], [1, 1], [2, 1], ["a", "a"])
    >>> [column.values.flatten().tolist() for column in columns]
    [[3, 3], [1, 1, 0]]
    """
    prompts: dict[Hashable, Tensor] = {}
    responses = []
    for place, (experts, prompt, response) in enumerate(zip(rows, prompt_lengths, response_lengths, strict=True)):
        known = 0 if experts is None else len(experts)
        if experts is None or known - prompt - response not in (-1, 0):
            raise InvalidRow(
                place,
                f"the engine named the experts of {known} of {prompt + response} tokens: turn routing replay off "
                "(--rollout.no-replay-routing)",
            )
        whole = torch.cat([experts, experts[-1:]])[: prompt + response]
        prompts.setdefault(owners[place], whole[:prompt])
        responses.append(whole[prompt:])
    return RaggedTensor.from_list([prompts[owner] for owner in owners]), RaggedTensor.from_list(responses)


def order_completions(
    completions: Iterable[Completion], prompts: DataProto, sampling: SamplingParams
) -> list[Completion]:
    """The completions in the order of their requests, one each. Raises the errors of `attach_responses`."""
    uids = prompt_names(prompts)
    requests = len(prompts) * sampling.n
    names = [row_name(number, uids[number // sampling.n], sampling) for number in range(requests)]
    ordered: list[Completion | None] = [None] * requests
    for completion in completions:
        number = completion.request
        if not 0 <= number < requests:
            raise RowCountMismatch(f"the engine returned request {number}, but there are {requests}")
        if ordered[number] is not None:
            raise RowCountMismatch(f"{names[number]}: the engine returned request {number} twice")
        if completion.finish_reason not in FINISH_REASONS:
            raise RequestFailed(f"{names[number]} ended by {completion.finish_reason!r}, not {FINISH_REASONS}")
        ordered[number] = completion
    missing = [number for number, completion in enumerate(ordered) if completion is None]
    if missing:
        rows = list(dict.fromkeys(names[number] for number in missing))
        raise RowCountMismatch(
            f"the engine returned nothing for {', '.join(rows[:10])} ({len(missing)} of {requests} requests)"
        )
    return [completion for completion in ordered if completion is not None]


def collate_responses(
    completions: Sequence[Completion], width: int, pad_token_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ``responses`` int64, ``response_mask`` int64 and ``rollout_log_probs`` float32, all ``(B, R)`` with R = width.

    Raises:
        InvalidRow: a completion is longer than ``width``, or it does not have one log-prob, a number, for each token.

    >>> done = [Completion(0, [5, 2], [-0.5, -0.1], "stop"), Completion(1, [7], [-1.0], "stop")]
    >>> [column.tolist() for column in collate_responses(done, width=3, pad_token_id=0)[:2]]
    [[[5, 2, 0], [7, 0, 0]], [[1, 1, 0], [1, 0, 0]]]
    """
    tokens = ragged_rows([completion.token_ids for completion in completions], name="tokens")
    log_probs = ragged_rows([completion.log_probs for completion in completions], "f", "log-probs")
    for row in (tokens.lengths != log_probs.lengths).nonzero().flatten().tolist():
        raise InvalidRow(row, f"{int(tokens.lengths[row])} tokens, but {int(log_probs.lengths[row])} log-probs")
    responses, filled = pad_rows(tokens, width, pad_token_id)
    return responses, filled.to(torch.int64), pad_rows(log_probs, width, 0)[0]
