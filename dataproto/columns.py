"""The well-known columns: what each holds, in which shape, who writes it and who reads it.

Dimension letters: B rows, P prompt tokens, R response tokens, L = P + R tokens. Batches of prompts have R = 0. A column with
the letter n is ragged: its rows have n tokens each, without padding; M layers with experts, k experts of a token.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dataproto.errors import MissingColumn

RowMedia: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The ``multi_modal_inputs`` of a row: one mapping, or several, one for each turn that shows media, in order."""


def media_parts(row: RowMedia) -> Sequence[Mapping[str, Any]]:
    """The mappings of a row's media.

    >>> media_parts({"pixel_values": 1}), media_parts(({"pixel_values": 1}, {"pixel_values": 2}))
    (({'pixel_values': 1},), ({'pixel_values': 1}, {'pixel_values': 2}))
    """
    return (row,) if isinstance(row, Mapping) else row


def media_identity(row: RowMedia) -> Hashable:
    """Equal for rows that show the same objects, in the same parts.

    >>> one, equal = [1], [1]
    >>> media_identity({"pixel_values": one}) == media_identity(({"pixel_values": one}, {}))
    True
    >>> media_identity({"pixel_values": one}) == media_identity({"pixel_values": equal})
    False
    """
    return tuple(tuple(sorted((name, id(value)) for name, value in part.items())) for part in media_parts(row) if part)


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
    """

    name: str
    dtype: str
    shape: str
    written_by: str
    read_by: str
    meaning: str

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


MEDIA_INPUTS, IMAGE_KEYS = "multi_modal_inputs", "image_keys"
PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS = "prompt_routed_experts", "routed_experts"
_DATA, _ENGINE, _PLAY = "PromptBuilder", "RolloutWorker.generate", "RolloutWorker.play"
_RUN = "RolloutWorker.run"
_ACTOR, _CHUNKS = "ActorWorker", "ChunkRenderer.rows"


def _floats(name: str, written_by: str, read_by: str, meaning: str) -> Column:
    return Column(name, "float32", "B R", written_by, read_by, meaning)


def _objects(name: str, written_by: str, read_by: str, meaning: str) -> Column:
    return Column(name, "object", "B", written_by, read_by, meaning)


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
        ),
        Column("response_mask", "int64", "B R", _ENGINE, "actor, critic, algorithms", "1 on tokens the policy sampled"),
        Column("truncated", "bool", "B", _ENGINE, "reports", "cut at max_tokens: no end token came by then"),
        Column("agent_scored", "bool", "B", _RUN, "rewards", "the agent returned a reward of the row's episode"),
        Column("drafted_tokens", "int64", "B", _ENGINE, "metrics", "tokens drafted for it; only with speculation"),
        Column(
            "accepted_tokens", "int64", "B", _ENGINE, "metrics", "response tokens without a forward pass of their own"
        ),
        Column(
            "turn",
            "int64",
            "B R",
            _PLAY,
            "advantages over turns, reports",
            "number of the turn, from 1, that sampled a token or that its observation answers; 0 elsewhere",
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
        _floats("rollout_log_probs", _ENGINE, "actor, reports", "log-probs while sampling"),
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
        _floats("loss_weights", _CHUNKS, "cross entropy", "weight of each token in the loss"),
        Column("targets", "int64", "B R", _CHUNKS, "actor", "tokens to be scored, if some are not the next ones"),
        _floats("old_log_probs", f"{_ACTOR}.log_probs", "policy loss", "log-probs before the update"),
        _floats("actor_log_probs", "recipes.run.phases", "reports", "log-probs before the update, NaN where not known"),
        _floats("ref_log_prob", "ReferenceWorker.log_probs", "KL terms", "log-probs of the reference"),
        _floats("values", "CriticWorker.values", "advantages", "value of each token"),
        _floats("token_level_rewards", "RewardWorker.score", "advantages", "rewards, usually at the end"),
        _floats("token_level_scores", "recipes with a KL penalty", "reports", "rewards before any KL penalty"),
        _floats("advantages", "recipes.algorithms.advantages", "policy loss", "advantage of each token"),
        _floats(
            "rollout_is_weights", "recipes.run.phases", "policy loss", "weight of each token for the engine's error"
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
        _floats("returns", "recipes.algorithms.advantages", "critic loss", "target of the value"),
        _objects(
            "uid",
            f"{_DATA}, or the recipe",
            "engine, advantages, actor",
            "one for each occurrence of a prompt, shared by its samples",
        ),
        _objects("raw_prompt_ids", _DATA, "engine", "list[int], one placeholder an image"),
        _objects(
            "prompt_log_probs",
            _ENGINE,
            "the caller",
            "list[float] on request, one a prompt token; NaN for the first and for media",
        ),
        _objects("top_log_probs", _ENGINE, "the caller", "list of (token, log-prob) a response token, on request"),
        _objects("top_prompt_log_probs", _ENGINE, "the caller", "the same for the tokens of the prompt"),
        _objects("multi_modal_data", _DATA, "engine", '{"image": [PIL], "video": [(frames, metadata)]}'),
        _objects(
            MEDIA_INPUTS,
            _DATA,
            "actor, reference, critic",
            "pixel values and grids; of an episode a tuple of them, one for each turn that shows media",
        ),
        _objects(
            IMAGE_KEYS,
            _DATA,
            _PLAY,
            "(digest, lengths) of each image's inputs, which episodes reuse; remove it if you change multi_modal_inputs",
        ),
        _objects("raw_prompt", "the data set", "reports, agent loops", "chat messages"),
        _objects("data_source", "the data set", "rewards, reports", "where the row comes from"),
        _objects("reward_model", "the data set", "rewards", '{"style", "ground_truth"}'),
        _objects("extra_info", "the data set", "rewards", "dict of whatever else"),
        _objects("own_columns", "the data set", "rewards", "dict of its columns but prompts and media"),
        _objects("media_columns", "the data set", "rewards", 'dict of its columns of media: {"photo": "image"}'),
        _objects("index", "the data set", "reports", "row number in the data set"),
        _floats("entropys", f"{_ACTOR}.log_probs", "reports", "entropy of the policy, if asked for"),
        _objects("score", "RewardWorker.score", "reports", "the reward function's score"),
        _objects("acc", "RewardWorker.score", "reports", "1 for a right answer, if the function tells"),
        _objects("trajectory", _PLAY, "advantages, reports", "name of the episode, shared by its rows"),
        _objects("end_reason", _PLAY, "metrics, reports", "why the episode ended, see `EndReason`"),
        _objects("actions", _PLAY, "reports", "list[str], the text of each turn"),
        _objects(
            "states",
            _PLAY,
            "advantages over turns",
            "list[str], a digest of the observation before each turn: its texts and pixels",
        ),
        _objects("info", _PLAY, "recipes", "numbers and texts of the environment's last info"),
        _objects("end_message", _PLAY, "reports", "what the environment of a failed episode did"),
        _objects("new_row", _RUN, "metrics, reports", "why an agent's episode has this row; empty for its first"),
        _objects("response_text", "RewardWorker.score", "reports", "the response without special tokens"),
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


SCORED_NUMBERS = ("score", "acc")
"""The columns of the table that are numbers of a reward function."""


_FREE = ("index", "turns")  # No reader takes a batch for another one because of these.


def taken_names(names: Iterable[str], present: Iterable[str]) -> list[str]:
    """Those of ``names`` that further numbers of rows, from a reward function or an environment, cannot have.

    They are the ``present`` columns, and names of the table, except `SCORED_NUMBERS`: the library writes such columns into the
    batch later, or takes it for an episode or a chunk where it finds them. ``index`` and ``turns`` are free where absent.

    >>> taken_names(["acc", "turns", "values", "speed"], present=["responses"])
    ['values']
    >>> taken_names(["acc", "turns", "values", "speed"], present=["responses", "turns"])
    ['turns', 'values']
    """
    return sorted({*names} & ((COLUMNS.keys() - {*SCORED_NUMBERS, *_FREE}) | {*present}))


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
