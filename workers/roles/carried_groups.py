"""How samples that continue later are spread over ranks, and their rows.

Letters: B rows, R response tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, errors, object_array
from dataproto.collation import pad_rows, ragged_rows
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS, require
from dataproto.errors import DataProtoError, RequestFailed
from dataproto.vlm import VLMFamily
from rollout.continuation import BEGUN, BegunTurn, Tokens
from rollout.engine import Completion, FinishReason, SamplingParams
from rollout.responses import attach_responses, expert_columns
from workers.ranks.dispatch_modes import Arguments, join_rows
from workers.training.mini_batches import ROW

FINISHED = "_finished"
"""The column that tells which samples have finished; what the other rows hold besides `BEGUN` has no meaning."""
FAILED = "_failed"
"""The column with the error of the engine at a row, as the name of its class and its message; ``None`` for other rows."""
GROUP = "_group"
"""The column with the number of each row's group in the whole batch."""
DEALT = "_dealt"
"""The column with the data-parallel rank that each row's group was dealt to, -1 before. There its environments are held."""
GROUPS = "_groups"
"""The number of groups in the whole batch, a fact."""


def number_groups(samples: DataProto, parts: int = 1) -> DataProto:
    """The samples with the columns `GROUP` and `DEALT` and the fact `GROUPS`.

    Groups are dealt to ``parts``, and numbered part after part. A group that was dealt before stays where it is, and each other
    one goes to the part that has the fewest.

    >>> rows = DataProto.from_dict(non_tensors={"uid": ["a", "a", "b", "c", "c"]})
    >>> dealt = number_groups(rows, parts=2)
    >>> dealt[GROUP].tolist(), dealt[DEALT].tolist()
    ([0, 0, 2, 1, 1], [0, 0, 1, 0, 0])
    >>> number_groups(dealt[2:], parts=2)[DEALT].tolist()
    [1, 0, 0]
    """
    require(samples, "uid")
    before = samples[DEALT].tolist() if DEALT in samples else [-1] * len(samples)
    dealt = {uid: part for uid, part in zip(samples["uid"], before, strict=True) if 0 <= part < parts}
    counts, uids = Counter(dealt.values()), list(dict.fromkeys(samples["uid"]))
    for uid in uids:
        if uid not in dealt:
            dealt[uid] = min(range(parts), key=lambda part: counts[part])
            counts[dealt[uid]] += 1
    numbers = {uid: number for number, uid in enumerate(sorted(uids, key=lambda uid: dealt[uid]))}
    numbered = samples[:]
    numbered[GROUP] = np.array([numbers[uid] for uid in samples["uid"]], dtype=np.int64)
    numbered[DEALT] = np.array([dealt[uid] for uid in samples["uid"]], dtype=np.int64)
    numbered.meta_info[GROUPS] = len(uids)
    return numbered


def split_groups(call: Arguments, parts: int) -> list[Arguments]:
    """The call ``advance(samples, ...)`` for each of ``parts`` ranks; the rows of a group stay together."""
    samples = call.first("samples")
    numbered = number_groups(samples, parts)
    numbered[ROW] = np.arange(len(samples))
    return call.with_first("samples", (numbered[np.flatnonzero(numbered[DEALT] == part)] for part in range(parts)))


def join_in_order(results: Sequence[Any]) -> Any:
    """The rows of all ranks in the order of the whole batch."""
    joined = join_rows(results)
    joined = joined[np.argsort(joined[ROW], kind="stable")]  # an episode may have several rows
    joined.pop(non_tensor_batch_keys=[ROW])
    return joined


def share_of(samples: DataProto, wanted: int) -> int:
    """How many of the ``wanted`` groups these samples, some of all, have to contribute. The shares of all add up to ``wanted``.

    >>> rows = number_groups(DataProto.from_dict(non_tensors={"uid": list("abcde")}))
    >>> share_of(rows[:2], 4), share_of(rows[2:], 4)
    (1, 3)
    """
    if not len(samples):
        return 0
    first, last, total = int(samples[GROUP].min()), int(samples[GROUP].max()) + 1, int(samples.meta_info[GROUPS])
    return wanted * last // total - wanted * first // total


def response_rows(
    samples: DataProto,
    found: Sequence[tuple[Tokens, FinishReason]],
    failure: tuple[int, DataProtoError] | None,
    sampling: SamplingParams,
    family: VLMFamily,
    pad_token_id: int,
    no_experts: Tensor | None = None,
) -> DataProto:
    """Rollout rows of the finished responses, with ``weight_version (B, R)``, and of the others what has begun.

    ``failure``: see `with_begun`. ``no_experts (0, M, k)``: of an engine that records experts; the rows then have theirs.
    """
    whole = [reason != "abort" for _, reason in found]
    shown = [tokens if finished else Tokens() for (tokens, _), finished in zip(found, whole, strict=True)]
    completions = [
        Completion(place, tokens.token_ids, tokens.log_probs, "length" if reason == "abort" else reason)
        for place, (tokens, (_, reason)) in enumerate(zip(shown, found, strict=True))
    ]
    data = attach_responses(samples, completions, replace(sampling, n=1), family, pad_token_id)
    versions = ragged_rows([tokens.weight_versions for tokens in shown], name="versions")
    data["weight_version"] = pad_rows(versions, data["responses"].shape[1], 0)[0]
    if no_experts is not None:
        prompts = [int(count) * done for count, done in zip(samples["attention_mask"].sum(1), whole, strict=True)]
        owners = [(uid, done) for uid, done in zip(samples["uid"], whole, strict=True)]
        known = [tokens.experts if done else no_experts for tokens, done in zip(shown, whole, strict=True)]
        data[PROMPT_ROUTED_EXPERTS], data[ROUTED_EXPERTS] = expert_columns(known, prompts, [*map(len, shown)], owners)
    begun = [
        [BegunTurn(tokens)] if tokens and not finished else []
        for (tokens, _), finished in zip(found, whole, strict=True)
    ]
    return with_begun(data, whole, begun, failure)


def with_begun(
    data: DataProto,
    finished: Sequence[bool],
    begun: Sequence[Sequence[BegunTurn]],
    failure: tuple[int, DataProtoError] | None,
) -> DataProto:
    """The rows with the columns `FINISHED`, `BEGUN` and `FAILED`. ``failure``: where the engine failed, and its error."""
    data[FINISHED] = torch.tensor(list(finished), dtype=torch.bool)
    data[BEGUN] = object_array([[turn.plain() for turn in turns] for turns in begun])
    failed: list[list[str] | None] = [None] * len(data)
    if failure is not None:
        place, error = failure
        failed[place] = [type(error).__name__, str(error)]
    data[FAILED] = object_array(failed)
    return data


def engine_error(failed: Sequence[str], row: str) -> DataProtoError:
    """The error of a row of the column `FAILED`. ``row`` names it in the message.

    >>> engine_error(["NonFiniteLogits", "request 5: the logits are not finite"], "row 3")
    NonFiniteLogits('row 3: request 5: the logits are not finite')
    >>> engine_error(["InvalidRow", "row 0: no prompt"], "row 3")
    RequestFailed('row 3: InvalidRow: row 0: no prompt')
    """
    name, message = failed
    kind = getattr(errors, name, RequestFailed)  # also of an engine of one's own, with errors of its own
    try:
        error: DataProtoError = kind(f"{row}: {message}")
    except TypeError:  # of a class that is not made of only a message
        return RequestFailed(f"{row}: {name}: {message}")
    return error
