"""Checks of columns against the table of `dataproto.columns`: forms, values, padding, tokens and media."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.columns import COLUMNS, MEDIA_INPUTS, Column, media_parts
from dataproto.errors import InvalidColumn

Sizes = dict[str, tuple[int, str]]  # a dimension letter to its size and the column that it is known from


def validate(columns: Mapping[str, Any]) -> None:
    """See ``DataProto.validate``; columns that the table does not list pass."""
    known = {name: column for name, column in columns.items() if name in COLUMNS}
    sizes: Sizes = {}
    for name, column in known.items():
        _check_form(COLUMNS[name], column, sizes)
    _check_lengths(sizes)
    for name, column in known.items():
        _check_values(COLUMNS[name], column)
    _check_padding(known, sizes)
    _check_tokens(known)
    _check_media(known)


def _check_rows(name: str, wrong: Tensor, expected: str, found: str | Callable[[int], str]) -> None:
    """Raises for the first row that is ``wrong (B,)``."""
    rows = wrong.nonzero()
    if len(rows):
        row = int(rows[0])
        there = found if isinstance(found, str) else found(row)
        raise InvalidColumn(f"column {name!r}, row {row}: expected {expected}, found {there}")


# Dtypes and shapes


def _check_form(law: Column, column: Any, sizes: Sizes) -> None:
    if law.dtype == "object":
        if not isinstance(column, np.ndarray):
            raise InvalidColumn(f"column {law.name!r}: expected an array of objects, found {_form(column)}")
        return
    expected = f"{law.dtype} {law.shape_text}"
    if "n" in law.shapes[0]:
        tail = getattr(column, "tail", None)
        if tail is None or len(tail) != len(law.shapes[0]) - 2 or str(column.dtype)[6:] not in law.dtype.split(" or "):
            raise InvalidColumn(f"column {law.name!r}: expected ragged {expected}, found {_form(column)}")
        return
    dense = isinstance(column, Tensor) and not column.is_nested and column.dtype == getattr(torch, law.dtype)
    letters = next((letters for letters in law.shapes if dense and _fits(letters, column.shape)), None)
    if letters is None:
        raise InvalidColumn(f"column {law.name!r}: expected {expected}, found {_form(column)}")
    for letter, size in zip(letters, column.shape):
        known, where = sizes.setdefault(letter, (size, law.name))
        if known != size:
            known_from = f"{letter} = {known} as in {where!r}"
            raise InvalidColumn(f"column {law.name!r}: expected {expected} with {known_from}, found {_form(column)}")


def _fits(letters: list[str], shape: torch.Size) -> bool:
    return len(letters) == len(shape) and all(
        not letter.isdigit() or int(letter) == size for letter, size in zip(letters, shape)
    )


def _form(column: Any) -> str:
    if isinstance(column, np.ndarray):
        return f"an array of {column.dtype} {column.shape}"
    if isinstance(column, Tensor) and not column.is_nested:
        return f"{str(column.dtype).removeprefix('torch.')} {tuple(column.shape)}"
    return f"a {type(column).__name__}"


def _check_lengths(sizes: Sizes) -> None:
    """Checks that L = P + R, and that a token precedes every response."""
    if "L" not in sizes or "R" not in sizes:
        return
    (tokens, where), (response, there) = sizes["L"], sizes["R"]
    if "P" in sizes and tokens != sizes["P"][0] + response:
        parts = f"L = P + R = {sizes['P'][0]} + {response} tokens as in {sizes['P'][1]!r} and {there!r}"
        raise InvalidColumn(f"column {where!r}: expected {parts}, found {tokens}")
    if tokens <= response:
        raise InvalidColumn(f"column {there!r}: expected fewer than the {tokens} tokens of {where!r}, found {response}")


# Values


def _check_values(law: Column, column: Any) -> None:
    if law.allowed:
        odd = ~torch.isin(column, torch.tensor(law.allowed, dtype=column.dtype, device=column.device))
        expected = f"only {', '.join(map(str, law.allowed))}"
        _check_rows(law.name, odd.any(1), expected, lambda row: str(column[row][odd[row]][0].item()))
    if isinstance(law.inert, dict):
        for row, value in enumerate(column):
            several = law.name == MEDIA_INPUTS and isinstance(value, tuple | list)
            for part in value if several else (value,):
                if not isinstance(part, Mapping):
                    raise InvalidColumn(
                        f"column {law.name!r}, row {row}: expected a dict, found a {type(part).__name__}"
                    )


def _check_padding(known: Mapping[str, Any], sizes: Sizes) -> None:
    """Checks that prompts are padded on the left and responses on the right; without R, that tokens are contiguous."""
    mask = known.get("attention_mask")
    if mask is None:
        return
    starts = torch.nn.functional.pad(mask, (1, 0)).diff(dim=1) > 0
    _check_rows("attention_mask", starts.sum(1) > 1, "tokens next to each other", "padding between them")
    if "R" not in sizes:
        return
    response = mask[:, sizes["L"][0] - sizes["R"][0] :]
    prompt = mask[:, : sizes["L"][0] - sizes["R"][0]]
    _check_rows(
        "attention_mask", (prompt.diff(dim=1) < 0).any(1), "a prompt padded on the left", "padding on its right"
    )
    _check_rows(
        "attention_mask", (response.diff(dim=1) > 0).any(1), "a response padded on the right", "padding on its left"
    )
    if "response_mask" in known:
        padding = known["response_mask"].bool() & (response == 0)
        _check_rows("response_mask", padding.any(1), "1 only where attention_mask is 1", "1 on padding")


def _check_tokens(known: Mapping[str, Any]) -> None:
    """Checks that ``input_ids`` are the prompt and then the response, and that placeholders are attended tokens."""
    ids, prompts, responses = (known.get(name) for name in ("input_ids", "prompts", "responses"))
    if ids is not None and responses is not None:
        last = ids[:, ids.shape[1] - responses.shape[1] :]
        _check_rows("responses", (last != responses).any(1), "the last tokens of 'input_ids'", "others")
    if ids is not None and prompts is not None:
        _check_rows(
            "prompts", (ids[:, : prompts.shape[1]] != prompts).any(1), "the first tokens of 'input_ids'", "others"
        )
    types, mask = known.get("mm_token_type_ids"), known.get("attention_mask")
    if types is not None and mask is not None:
        padding = (types != 0) & (mask == 0)
        _check_rows("mm_token_type_ids", padding.any(1), "0 where attention_mask is 0", "a placeholder on padding")


# Media


def _check_media(known: Mapping[str, Any]) -> None:
    """Checks that models and engine get the same number of media, and that patches match the placeholder tokens."""
    inputs, objects = known.get("multi_modal_inputs"), known.get("multi_modal_data")
    if inputs is None:
        return
    types = known.get("mm_token_type_ids")
    for number, (kind, pixels) in enumerate((("image", "pixel_values"), ("video", "pixel_values_videos")), start=1):
        if objects is not None:
            for row, (media, given) in enumerate(zip(inputs, objects)):
                grids = [part[f"{kind}_grid_thw"] for part in media_parts(media) if f"{kind}_grid_thw" in part]
                objects_given = given.get(kind)
                found = sum(map(len, grids))
                if grids and objects_given is not None and found != len(objects_given):
                    expected = f"{len(objects_given)} {kind}s as in 'multi_modal_data'"
                    raise InvalidColumn(f"column 'multi_modal_inputs', row {row}: expected {expected}, found {found}")
        if types is not None:
            _check_patches(inputs, (types == number).sum(1).tolist(), kind, pixels)


def _check_patches(inputs: np.ndarray, tokens: Sequence[int], kind: str, pixels: str) -> None:
    """Checks that a placeholder token is the same number of patches in all rows. Media without grids need only be present."""
    share: int | None = None
    for row, (media, count) in enumerate(zip(inputs, tokens)):
        where = f"column 'multi_modal_inputs', row {row}: expected"
        parts = [part for part in media_parts(media) if part.get(pixels) is not None]
        if bool(parts) != (count > 0):
            raise InvalidColumn(f"{where} {kind}s for {count} tokens, found {'some' if parts else 'none'}")
        grids = [torch.as_tensor(part[f"{kind}_grid_thw"]) for part in parts if f"{kind}_grid_thw" in part]
        if count == 0 or not grids:
            continue
        patches, there = sum(int(grid.prod(-1).sum()) for grid in grids), sum(len(part[pixels]) for part in parts)
        if patches != there:
            raise InvalidColumn(f"{where} {patches} patches as in {kind}_grid_thw, found {there}")
        share = share or max(patches // count, 1)
        if patches != share * count:
            raise InvalidColumn(
                f"{where} {share * count} patches for {count} {kind} tokens, {share} each, found {patches}"
            )
