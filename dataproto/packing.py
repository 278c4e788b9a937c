"""Padded rows: packed into one sequence and back, or padded to a common width.

A packed sequence ``(1, T)`` holds the attended tokens of all rows one after the other; ``cu_seqlens`` says where each row begins.

Dimension letters: B rows, P prompt tokens, R response tokens, L = P + R; T packed tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.columns import COLUMNS, HasColumns, RowMedia, media_identity
from dataproto.errors import InvalidColumn
from dataproto.transfer import move, move_readable

MAX_TOKENS = "max_tokens"
"""The key in ``meta_info`` for the longest response that sampling allowed; R is the length of the longest response there is."""
PAD_TOKEN = "pad_token_id"
"""The key in ``meta_info`` for the token that fills the padding in ``input_ids``."""

_TOKEN_COLUMNS = ("prompts", "responses", "input_ids")
_ROW_COLUMNS = ("attention_mask", "input_ids", "position_ids", "mm_token_type_ids")  # (B, L)
_RESPONSE_COLUMNS = ("response_mask", "responses")  # (B, R)
# These fields of packed rows are read on the host.
_READ_ON_HOST = ("token_types", "cu_seqlens", "key_index", "key_cu_seqlens", "predictors")

Batch = TypeVar("Batch", bound=HasColumns)


@dataclass(frozen=True)
class PackedRows:
    """Rows without their padding and the positions of their response tokens.

    Each row is a segment. A row with the prompt of the row before is a segment of only its response tokens, whose queries attend
    to the keys of the shared prompt and to its own. So a prompt with n samples is computed once.

    Dimension letters: T packed tokens, B rows, K keys that segments attend to (T if no prompt is shared), N response tokens in
    the loss, M layers with experts, k experts of a token.
    """

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (4, 1, T) m-RoPE with text positions first, or (1, T)
    token_types: Tensor  # (1, T) int8: 0 text, 1 image, 2 video, 3 sound
    cu_seqlens: Tensor  # (B + 1,) int32, start of each segment, and T
    max_length: int
    key_index: Tensor | None  # (K,) index into T, or None if each segment attends to itself only
    key_cu_seqlens: Tensor  # (B + 1,) int32, start of the keys of each segment, and K
    key_max_length: int
    predictors: Tensor  # (N,) index into T of the token before each response token
    targets: Tensor  # (N,) the response tokens
    response_cells: Tensor  # (N,) index into the flattened (B, R) grid
    routed_experts: Tensor | None = None  # (T, M, k) recorded experts; None: the routers choose
    routed: Tensor | None = None  # (T,) bool, false on tokens that only fill up the sequence; None: there are none

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows on another device. `dataproto.transfer.on_host` reads what sizes and places are computed from, such as
        boundaries, without waiting for that device.
        """
        moved = {
            name: (move_readable if name in _READ_ON_HOST else move)(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    token_types: Tensor | None = None,
    shares_prompt: Tensor | None = None,
) -> PackedRows:
    """Packs the rows one after the other, without their padding.

    Args:
        input_ids, attention_mask: ``(B, L)``.
        position_ids: ``(B, 4, L)`` or ``(B, L)``.
        response_mask: ``(B, R)``, 1 on tokens whose log-prob is wanted; R is the last R columns of ``input_ids``.
        token_types: ``(B, L)``, or ``None`` for text only.
        shares_prompt: ``(B,)`` bool, see `prompt_sharing`; by default no row shares its prompt.

    Raises:
        InvalidColumn: a row has no token, or a response token has no attended token before it; names the row.

    >>> ids = torch.tensor([[0, 5, 6, 7], [3, 4, 8, 0]])
    >>> mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    >>> packed = pack_rows(ids, mask, mask.cumsum(1) - 1, torch.tensor([[1, 1], [1, 0]]))
    >>> packed.input_ids.tolist(), packed.cu_seqlens.tolist()
    ([[5, 6, 7, 3, 4, 8]], [0, 3, 6])
    >>> packed.targets.tolist(), packed.predictors.tolist(), packed.response_cells.tolist()
    ([6, 7, 8], [0, 1, 4], [0, 1, 2])
    """
    rows, length = input_ids.shape
    width = response_mask.shape[1]
    attended = attention_mask.bool()
    if rows and int(attended.sum(1).min()) == 0:
        raise InvalidColumn(f"row {int(attended.sum(1).argmin())} has no attended token: every row needs a prompt")
    shared = torch.zeros(rows, dtype=torch.bool) if shares_prompt is None else shares_prompt
    kept, packed_index = _packed_index(attended, shared, length - width)
    flat = kept.flatten().nonzero().squeeze(1)
    cells, row, column, predictors = _response_places(response_mask, attended, packed_index)
    if position_ids.ndim == 3:
        positions = position_ids.transpose(0, 1).flatten(1)[:, flat].unsqueeze(1)
    else:
        positions = position_ids.flatten()[flat].unsqueeze(0)
    types = torch.zeros_like(flat, dtype=torch.int8) if token_types is None else token_types.flatten()[flat]
    cu_seqlens, longest = boundaries(kept.sum(1))
    key_cu_seqlens, key_longest = boundaries(attended.sum(1))
    return PackedRows(
        input_ids=input_ids.flatten()[flat].unsqueeze(0),
        position_ids=positions,
        token_types=types.unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_length=longest,
        key_index=packed_index[attended] if bool(shared.any()) else None,
        key_cu_seqlens=key_cu_seqlens,
        key_max_length=key_longest,
        predictors=predictors,
        targets=input_ids[row, column],
        response_cells=cells,
    )


def _packed_index(attended: Tensor, shared: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Which cells ``(B, L)`` are packed, and the packed index of the token in each cell.

    The first ``prompt`` columns of a row that shares its prompt are not packed; their cells have the indices of the row whose
    prompt it is.
    """
    rows, length = attended.shape
    kept = attended.clone()
    kept[shared, :prompt] = False
    packed_index = (kept.flatten().cumsum(0) - 1).view(rows, length)
    leader = torch.where(shared, 0, torch.arange(rows)).cummax(0).values  # This is the row whose prompt each row uses.
    packed_index[shared, :prompt] = packed_index[leader[shared], :prompt]
    return kept, packed_index


def fill_up(rows: PackedRows, length: int, segment: int = 128) -> PackedRows:
    """Appends inert segments of at most ``segment`` tokens, which have no response tokens, up to ``length`` tokens.

    >>> ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)
    >>> filled = fill_up(pack_rows(ids, mask, mask.cumsum(1) - 1, mask[:, :1]), 8, segment=3)
    >>> filled.input_ids.tolist(), filled.cu_seqlens.tolist()
    ([[5, 6, 7, 0, 0, 0, 0, 0]], [0, 3, 6, 8])
    """
    tokens = rows.input_ids.shape[-1]
    if tokens >= length:
        return rows
    tail = length - tokens
    device = rows.cu_seqlens.device
    ends = torch.arange(segment, tail + segment, segment, dtype=torch.int32, device=device).clamp_max(tail)
    longest = min(segment, tail)
    key_index, experts = rows.key_index, rows.routed_experts
    routed = torch.ones(tokens, dtype=torch.bool, device=device) if rows.routed is None else rows.routed
    return replace(
        rows,
        input_ids=pad(rows.input_ids, (0, tail)),
        position_ids=pad(rows.position_ids, (0, tail)),
        token_types=pad(rows.token_types, (0, tail)),
        cu_seqlens=torch.cat([rows.cu_seqlens, rows.cu_seqlens[-1] + ends]),
        max_length=max(rows.max_length, longest),
        key_index=None if key_index is None else torch.cat([key_index, torch.arange(tokens, length, device=device)]),
        key_cu_seqlens=torch.cat([rows.key_cu_seqlens, rows.key_cu_seqlens[-1] + ends]),
        key_max_length=max(rows.key_max_length, longest),
        routed_experts=None if experts is None else torch.cat([experts, experts.new_zeros(tail, *experts.shape[1:])]),
        routed=pad(routed, (0, tail)),
    )


def _response_places(
    response_mask: Tensor, attended: Tensor, packed_index: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each response token ``(N,)``: its cell in ``(B, R)``, its row and column in ``(B, L)``, and the packed index of the
    attended token before it.
    """
    width, length = response_mask.shape[1], attended.shape[1]
    cells = response_mask.bool().flatten().nonzero().squeeze(1)
    row, column = cells // max(width, 1), cells % max(width, 1) + length - width
    before = packed_index.where(attended, -1).cummax(1).values  # The index of the last attended token up to each cell.
    predictors = before[row, column - 1].where(column > 0, -1)
    misplaced = ~attended[row, column] | (predictors < 0)
    if bool(misplaced.any()):
        raise InvalidColumn(
            f"row {int(row[misplaced][0])}: response_mask is 1 on a token that is not attended to or has no token before it"
        )
    return cells, row, column, predictors


def boundaries(lengths: Tensor) -> tuple[Tensor, int]:
    """Where segments of ``lengths (n,)`` begin and end one after the other, ``(n + 1,)`` int32, and the longest length.

    >>> boundaries(torch.tensor([2, 3]))
    (tensor([0, 2, 5], dtype=torch.int32), 3)
    """
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0


def prompt_sharing(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    token_types: Tensor,
    media: Sequence[RowMedia | None],
    response_width: int,
) -> Tensor:
    """Which rows have the prompt of the row before: its tokens, positions and media objects; ``(B,)`` bool.

    The prompt is all but the last ``response_width`` columns. Prompts of one column, as supervised rows have, are not shared:
    such rows would have to stay together for one token. Nor are prompts that end within an image, whose tokens may see those of
    the response.

    Args:
        media: of the prompts; ``None`` for a row whose media are not split at the end of its prompt, which shares nothing.

    >>> ids = torch.tensor([[5, 6, 1], [5, 6, 2], [5, 7, 2]])
    >>> ones = torch.ones_like(ids)
    >>> prompt_sharing(ids, ones, ones, 0 * ids, [{}, {}, {}], response_width=1).tolist()
    [False, True, False]
    """
    shared = torch.zeros(len(input_ids), dtype=torch.bool)
    prompt = input_ids.shape[1] - response_width
    if len(input_ids) < 2 or prompt < 2:
        return shared
    same = torch.ones(len(input_ids) - 1, dtype=torch.bool)
    for column in (input_ids, attention_mask, position_ids, token_types):
        part = column[..., :prompt].flatten(1)
        same &= (part[1:] == part[:-1]).all(1)
    same &= token_types[1:, prompt - 1] == 0
    objects = [None if row is None else media_identity(row) for row in media]
    shared[1:] = same & torch.tensor([a is not None and a == b for a, b in pairwise(objects)], dtype=torch.bool)
    return shared


def unpack_cells(values: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """Puts values of tokens ``(N,)`` into their cells of a ``(B, R)`` grid of zeros; gradients flow.

    >>> unpack_cells(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), (2, 2)).tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    return values.new_zeros(shape[0] * shape[1]).index_put((cells,), values).view(shape)


# Common widths


def token_widths(data: HasColumns) -> tuple[int, int]:
    """P and R of a batch, from its dense tensors; 0 if it has no such tokens."""
    dense = _dense_columns(data)
    length = next((dense[name].shape[-1] for name in _ROW_COLUMNS if name in dense), 0)
    response = next((dense[name].shape[1] for name in _RESPONSE_COLUMNS if name in dense), 0)
    return max(length - response, 0), response


def other_response_columns(data: HasColumns) -> set[str]:
    """Names of columns that `COLUMNS` does not list and whose second dimension is R: they may be columns of responses."""
    response = token_widths(data)[1]
    return {
        name for name, column in _dense_columns(data).items() if name not in COLUMNS and column.shape[1] == response
    }


def widen(data: Batch, prompt: int, response: int, others: Collection[str] = ()) -> Batch:
    """Pads prompts on the left to ``prompt`` columns, responses on the right to ``response``; ``data`` itself if it is as wide.

    The padding is as in a rollout of that width: the pad token (see `PAD_TOKEN`; 0 without it) in token columns, positions that
    continue after the response, and 0 everywhere else.

    Args:
        others: columns of responses ``(B, R, ...)`` that `COLUMNS` does not list.

    >>> from dataproto import DataProto
    >>> data = DataProto.from_dict({"input_ids": torch.tensor([[5, 6]]), "response_mask": torch.tensor([[1]])})
    >>> wider = widen(data, prompt=2, response=3)
    >>> wider["input_ids"].tolist(), wider["response_mask"].tolist()
    ([[0, 5, 6, 0, 0]], [[1, 0, 0]])
    """
    before, now = token_widths(data)
    left, right = prompt - before, response - now
    if not left and not right:
        return data
    added = {"P": (left, 0), "R": (0, right), "L": (left, right)}
    wider: Batch = data[:]
    for name, column in _dense_columns(data).items():
        letter = COLUMNS[name].shape[-1] if name in COLUMNS else "R" if name in others else "B"
        if name == "position_ids":
            following = column[..., -1:] + torch.arange(1, right + 1, device=column.device)
            wider[name] = torch.cat([pad(column, (left, 0)), following], dim=-1)
        elif letter in added:
            fill = data.meta_info.get(PAD_TOKEN, 0) if name in _TOKEN_COLUMNS else 0
            wider[name] = pad(column, (0, 0) * (column.ndim - 2) + added[letter], value=fill)
    return wider


def equally_wide(parts: Sequence[Batch]) -> list[Batch]:
    """Pads all batches to the widest prompt and the widest response among them.

    A column that `COLUMNS` does not list counts as one of responses if its second dimension is R in every batch. If a batch has
    columns of L tokens but none that tells R, all stay as they are: whether prompts or responses differ is unknown.
    """
    if any(
        not (names := _dense_columns(part).keys()).isdisjoint(_ROW_COLUMNS) and names.isdisjoint(_RESPONSE_COLUMNS)
        for part in parts
    ):
        return list(parts)
    widths = [token_widths(part) for part in parts]
    prompt, response = (max(sizes) for sizes in zip(*widths)) if widths else (0, 0)
    others = set.intersection(*map(other_response_columns, parts)) if parts else set()
    return [widen(part, prompt, response, others) for part in parts]


def _dense_columns(data: HasColumns) -> dict[str, Tensor]:
    """The dense tensors ``(B, X, ...)``."""
    columns = {name: data[name] for name in data.names()}
    return {
        name: column
        for name, column in columns.items()
        if isinstance(column, Tensor) and not column.is_nested and column.ndim >= 2
    }
