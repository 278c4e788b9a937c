"""The well-known columns: what each holds, in which shape, who writes it and who reads it; and checks against that table.

Dimension letters: B rows, P prompt tokens, R response tokens, L = P + R tokens. Batches of prompts have R = 0. A column with
the letter n is ragged: its rows have n tokens each, without padding; M layers with experts, k experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidColumn, MissingColumn

RowMedia: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The ``multi_modal_inputs`` of a row: one mapping, or several, one for each turn that shows media, in order."""


def media_parts(row: RowMedia) -> Sequence[Mapping[str, Any]]:
    """The mappings of a row's media.

    >>> media_parts({"pixel_values": 1}), media_parts(({"pixel_values": 1}, {"pixel_values": 2}))
    (({'pixel_values': 1},), ({'pixel_values': 1}, {'pixel_values': 2}))
    """
    return (row,) if isinstance(row, Mapping) else row


class HasColumns(Protocol):
    """A batch, as far as the functions here and in `dataproto.packing` know it."""

    meta_info: dict[str, Any]

    def names(self) -> list[str]:
        """The names of its columns."""

    def __getitem__(self, item: Any, /) -> Any:
        """A column by its name; rows by a slice."""

    def __setitem__(self, name: str, column: Any, /) -> None:
        """Adds or replaces a column."""


@dataclass(frozen=True)
class Column:
    """One line of the table.

    Args:
        shape: dimension letters; ``|`` separates alternatives.
        inert: the value of a column of objects in inert rows (see ``pad_inert``); ``None``: any value.
        allowed: the only values that the column may hold; empty: any.
    """

    name: str
    dtype: str
    shape: str
    written_by: str
    read_by: str
    meaning: str
    inert: Any = None
    allowed: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[list[str]]:
        """Each alternative's letters."""
        return [shape.split() for shape in self.shape.split(" | ")]

    @property
    def shape_text(self) -> str:
        """The shape as error messages and documents write it.

        >>> COLUMNS["position_ids"].shape_text, COLUMNS["uid"].shape_text
        ('(B, 4, L) or (B, L)', '(B,)')
        """
        return " or ".join(f"({', '.join(letters)}{',' * (len(letters) == 1)})" for letters in self.shapes)

    def inert_row(self, row: int) -> Any:
        """A new inert object for the ``row``-th inert row. Strings get a number, so that no two rows share a ``uid``."""
        return f"{self.inert}-{row}" if isinstance(self.inert, str) else type(self.inert)(self.inert)


MEDIA_INPUTS = "multi_modal_inputs"
PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS = "prompt_routed_experts", "routed_experts"
_DATA, _ENGINE, _PLAY = "PromptBuilder", "RolloutWorker.generate", "RolloutWorker.play"
_ACTOR, _CHUNKS = "ActorWorker", "ChunkRenderer.rows"

COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("prompts", "int64", "B P", _ENGINE, "rewards, reports", "prompt tokens, left-padded"),
        Column(
            "responses", "int64", "B R", _ENGINE, "actor, reference, critic, rewards", "sampled tokens, right-padded"
        ),
        Column(
            "input_ids", "int64", "B L", f"{_DATA} (B P), {_ENGINE}", "engine, actor, reference, critic", "all tokens"
        ),
        Column(
            "attention_mask",
            "int64",
            "B L",
            f"{_DATA} (B P), {_ENGINE}",
            "engine, all models",
            "1 on tokens, 0 on padding",
            allowed=(0, 1),
        ),
        Column(
            "position_ids",
            "int64",
            "B 4 L | B L",
            f"{_DATA}, {_ENGINE}",
            "engine, all models",
            "m-RoPE positions (text, time, height, width), or one-dimensional ones",
        ),
        Column(
            "mm_token_type_ids",
            "int8",
            "B L",
            f"{_DATA}, {_ENGINE}",
            "all models",
            "0 text, 1 image, 2 video placeholder",
            allowed=(0, 1, 2),
        ),
        Column(
            "response_mask",
            "int64",
            "B R",
            _ENGINE,
            "actor, critic, algorithms",
            "1 on tokens the policy sampled",
            allowed=(0, 1),
        ),
        Column(
            "truncated", "bool", "B", _ENGINE, "TrainingClient, reports", "cut at max_tokens: no end token came by then"
        ),
        Column("drafted_tokens", "int64", "B", _ENGINE, "metrics", "tokens drafted for it; with speculation alone"),
        Column(
            "accepted_tokens", "int64", "B", _ENGINE, "metrics", "response tokens without a forward pass of their own"
        ),
        Column(
            "turn",
            "int64",
            "B R",
            _PLAY,
            "advantages over turns, reports",
            "number of the turn, from 1, that sampled a token or that its observation answers; 0 on padding and on "
            "turns of earlier rows",
        ),
        Column(
            "weight_version",
            "int64",
            "B R",
            f"{_PLAY}, RolloutWorker.advance",
            "reports",
            "number of the weights that sampled a token, from 1; 0 on others",
        ),
        Column("turns", "int64", "B", _PLAY, "reports", "number of turns of the episode"),
        Column("rollout_log_probs", "float32", "B R", _ENGINE, "actor, reports", "log-probs while sampling"),
        Column(
            PROMPT_ROUTED_EXPERTS,
            "uint8 or int16",
            "B n M k",
            f"{_ENGINE}, {_PLAY}",
            "actor",
            "experts that the engine sent each prompt token to; samples of a prompt share its values",
        ),
        Column(
            ROUTED_EXPERTS,
            "uint8 or int16",
            "B n M k",
            f"{_ENGINE}, {_PLAY}",
            "actor",
            "the same for response tokens; the last one, which the engine did not read, repeats the one before",
        ),
        Column("loss_weights", "float32", "B R", _CHUNKS, "cross entropy", "weight of each token in the loss"),
        Column("targets", "int64", "B R", _CHUNKS, "actor", "tokens to be scored, if some are not the next ones"),
        Column("old_log_probs", "float32", "B R", f"{_ACTOR}.log_probs", "policy loss", "log-probs before the update"),
        Column(
            "actor_log_probs",
            "float32",
            "B R",
            "recipes.run.phases",
            "reports",
            "log-probs before the update, NaN where not known",
        ),
        Column("ref_log_prob", "float32", "B R", "ReferenceWorker.log_probs", "KL terms", "log-probs of the reference"),
        Column("values", "float32", "B R", "CriticWorker.values", "advantages", "value of each token"),
        Column(
            "token_level_rewards", "float32", "B R", "RewardWorker.score", "advantages", "rewards, usually at the end"
        ),
        Column(
            "token_level_scores",
            "float32",
            "B R",
            "recipes with a KL penalty",
            "reports",
            "rewards before any KL penalty",
        ),
        Column(
            "advantages", "float32", "B R", "recipes.algorithms.advantages", "policy loss", "advantage of each token"
        ),
        Column(
            "rollout_is_weights",
            "float32",
            "B R",
            "recipes.run.phases",
            "policy loss",
            "weight of each token for the engine's error",
        ),
        Column("reward_baselines", "float32", "B", "recipes.run.phases", "advantages", "score of the greedy response"),
        Column(
            "high_covariance",
            "bool",
            "B R",
            "recipes.algorithms.covariances",
            "policy loss",
            "tokens that are held back",
        ),
        Column("returns", "float32", "B R", "recipes.algorithms.advantages", "critic loss", "target of the value"),
        Column(
            "uid",
            "object",
            "B",
            f"{_DATA}, or the recipe",
            "engine, advantages, actor",
            "one for each occurrence of a prompt, shared by its samples",
            "inert",
        ),
        Column("raw_prompt_ids", "object", "B", _DATA, "engine", "list[int], one placeholder an image", []),
        Column(
            "prompt_log_probs",
            "object",
            "B",
            _ENGINE,
            "the caller",
            "list[float] on request, one a prompt token; NaN for the first and for media",
            [],
        ),
        Column(
            "top_log_probs",
            "object",
            "B",
            _ENGINE,
            "the caller",
            "list of (token, log-prob) a response token, on request",
            [],
        ),
        Column(
            "top_prompt_log_probs", "object", "B", _ENGINE, "the caller", "the same for the tokens of the prompt", []
        ),
        Column(
            "multi_modal_data", "object", "B", _DATA, "engine", '{"image": [PIL], "video": [(frames, metadata)]}', {}
        ),
        Column(
            MEDIA_INPUTS,
            "object",
            "B",
            _DATA,
            "actor, reference, critic",
            "pixel values and grids; of an episode a tuple of them, one for each turn that shows media",
            {},
        ),
        Column("raw_prompt", "object", "B", "the data set", "reports, agent loops", "chat messages"),
        Column("data_source", "object", "B", "the data set", "rewards, reports", "where the row comes from"),
        Column("reward_model", "object", "B", "the data set", "rewards", '{"style", "ground_truth"}'),
        Column("extra_info", "object", "B", "the data set", "rewards", "dict of whatever else"),
        Column("index", "object", "B", "the data set", "reports", "row number in the data set"),
        Column("entropys", "float32", "B R", f"{_ACTOR}.log_probs", "reports", "entropy of the policy, if asked for"),
        Column("score", "object", "B", "RewardWorker.score", "reports", "the reward function's score"),
        Column("acc", "object", "B", "RewardWorker.score", "reports", "1 for a right answer, if the function tells"),
        Column("trajectory", "object", "B", _PLAY, "advantages, reports", "name of the episode, shared by its rows"),
        Column("end_reason", "object", "B", _PLAY, "metrics, reports", "why the episode ended, see `EndReason`"),
        Column("actions", "object", "B", _PLAY, "reports", "list[str], the text of each turn"),
        Column(
            "states",
            "object",
            "B",
            _PLAY,
            "advantages over turns",
            "list[str], a digest of the observation before each turn: its texts and pixels",
        ),
        Column("info", "object", "B", _PLAY, "recipes", "numbers and texts of the environment's last info"),
        Column("end_message", "object", "B", _PLAY, "reports", "what the environment of a failed episode did"),
        Column("response_text", "object", "B", "RewardWorker.score", "reports", "the response without special tokens"),
    )
}


def require(data: HasColumns, *names: str) -> None:
    """Checks that a batch has the columns that the caller reads.

    Raises:
        MissingColumn: columns are absent; names them, who writes them, and the columns that are present.

    >>> from dataproto import DataProto
    >>> require(DataProto.from_dict(non_tensors={"uid": ["a"]}), "uid", "old_log_probs")
    Traceback (most recent call last):
    dataproto.errors.MissingColumn: missing column: 'old_log_probs' (written by ActorWorker.log_probs); present: 'uid'
    """
    present = data.names()
    if absent := [name for name in names if name not in present]:
        raise MissingColumn(missing_message(absent, present))


def missing_message(absent: list[str], present: list[str]) -> str:
    """The message of `MissingColumn`: the absent columns, who writes them, and the present ones."""
    lines = [f"{name!r} (written by {COLUMNS[name].written_by})" if name in COLUMNS else repr(name) for name in absent]
    found = ", ".join(map(repr, present)) if present else "no columns"
    return f"missing column{'s' * (len(absent) > 1)}: {', '.join(lines)}; present: {found}"


def columns_table() -> str:
    """The table in Markdown."""
    lines = ["| column | dtype | shape | written by | read by | what |", "|---|---|---|---|---|---|"]
    for each in COLUMNS.values():
        cells = (f"`{each.name}`", each.dtype, each.shape_text, each.written_by, each.read_by, each.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Validation

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
