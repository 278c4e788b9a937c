"""The well-known columns: what each holds, in which shape, who writes it and who reads it.

Dimension letters: B rows, P prompt tokens, R response tokens, L = P + R tokens. Batches of prompts have R = 0.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataproto.errors import MissingColumn

if TYPE_CHECKING:
    from dataproto.protocol import DataProto


@dataclass(frozen=True)
class Column:
    """One line of the table.

    ``shape`` in dimension letters, alternatives apart by ``|``; ``inert`` is the object that stands in rows that must change
    nothing (``None``: no particular one); ``allowed`` are the only numbers that may stand there.
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
        """The shape as it is written elsewhere.

        >>> COLUMNS["position_ids"].shape_text, COLUMNS["uid"].shape_text
        ('(B, 4, L) or (B, L)', '(B,)')
        """
        return " or ".join(f"({', '.join(letters)}{',' * (len(letters) == 1)})" for letters in self.shapes)

    def inert_row(self, row: int) -> Any:
        """A fresh inert object for the ``row``-th inert row; strings are numbered, so that no two rows share one."""
        return f"{self.inert}-{row}" if isinstance(self.inert, str) else type(self.inert)(self.inert)


_DATA, _ENGINE, _ACTOR, _CHUNKS = "PromptBuilder", "RolloutWorker.generate", "ActorWorker", "ChunkRenderer.rows"

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
        Column("rollout_log_probs", "float32", "B R", _ENGINE, "actor, reports", "log-probs while sampling"),
        Column("loss_weights", "float32", "B R", _CHUNKS, "cross entropy", "weight of each token in the loss"),
        Column("targets", "int64", "B R", _CHUNKS, "actor", "tokens to be scored, if some are not the next ones"),
        Column("old_log_probs", "float32", "B R", f"{_ACTOR}.log_probs", "policy loss", "log-probs before the update"),
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
            "multi_modal_data", "object", "B", _DATA, "engine", '{"image": [PIL], "video": [(frames, metadata)]}', {}
        ),
        Column("multi_modal_inputs", "object", "B", _DATA, "actor, reference, critic", "pixel values and grids", {}),
        Column("raw_prompt", "object", "B", "the data set", "reports, agent loops", "chat messages"),
        Column("data_source", "object", "B", "the data set", "rewards, reports", "where the row comes from"),
        Column("reward_model", "object", "B", "the data set", "rewards", '{"style", "ground_truth"}'),
        Column("extra_info", "object", "B", "the data set", "rewards", "dict of whatever else"),
        Column("index", "object", "B", "the data set", "reports", "row number in the data set"),
        Column("entropys", "float32", "B R", f"{_ACTOR}.log_probs", "reports", "entropy of the policy, if asked for"),
        Column("score", "object", "B", "RewardWorker.score", "reports", "the reward function's score"),
        Column("acc", "object", "B", "RewardWorker.score", "reports", "1 for a right answer, if the function tells"),
        Column("response_text", "object", "B", "RewardWorker.score", "reports", "the response without special tokens"),
    )
}


def require(data: "DataProto", *names: str) -> None:
    """Checks that a batch has the columns that the caller reads.

    Raises:
        MissingColumn: names are absent; says which, who writes them and what is present.

    >>> from dataproto import DataProto
    >>> require(DataProto.from_dict(non_tensors={"uid": ["a"]}), "uid", "old_log_probs")
    Traceback (most recent call last):
    dataproto.errors.MissingColumn: missing column: 'old_log_probs' (written by ActorWorker.log_probs); present: 'uid'
    """
    absent = [name for name in names if name not in data]
    if absent:
        raise MissingColumn(missing_message(absent, data.names()))


def missing_message(absent: list[str], present: list[str]) -> str:
    """What is absent, who writes it, what is present."""
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
