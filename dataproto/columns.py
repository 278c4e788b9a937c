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
    """Equal for rows that show the same objects, or tensors of the same memory, in the same parts.

    Rows that are sent to another rank are equal there where they were equal before: the wire compares leaves in the same way.

    >>> one, equal = [1], [1]
    >>> media_identity({"pixel_values": one}) == media_identity(({"pixel_values": one}, {}))
    True
    >>> media_identity({"pixel_values": one}) == media_identity({"pixel_values": equal})
    False
    """
    from dataproto.serialization.leaves import leaf_key  # which loads torch

    return tuple(frozenset(zip(part, map(leaf_key, part.values()))) for part in media_parts(row) if part)


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
        shape: dimension letters; ``or`` separates alternatives.
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
        return [shape.split() for shape in self.shape.split(" or ")]


MEDIA_INPUTS, IMAGE_KEYS = "multi_modal_inputs", "image_keys"
PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS = "prompt_routed_experts", "routed_experts"
PAIR = "pair"

# Its columns are those of `Column`, whose docstring explains them.
_TABLE = r"""
prompts               | int64          | B P          | RolloutWorker.generate | rewards, reports | prompt tokens, left-padded
responses             | int64          | B R          | RolloutWorker.generate | actor, reference, critic, rewards | sampled tokens, right-padded
input_ids             | int64          | B L          | PromptBuilder (B P), RolloutWorker.generate | engine, actor, reference, critic | all tokens
attention_mask        | int64          | B L          | PromptBuilder (B P), RolloutWorker.generate | engine, all models | 1 on tokens, 0 on padding
position_ids          | int64          | B 4 L or B L | PromptBuilder, RolloutWorker.generate | engine, all models | m-RoPE positions (text, time, height, width), or one-dimensional ones
mm_token_type_ids     | int8           | B L          | PromptBuilder, RolloutWorker.generate | all models | 0 text, 1 image, 2 video, 3 sound placeholder
response_mask         | int64          | B R          | RolloutWorker.generate | actor, critic, algorithms | 1 on tokens the policy sampled
truncated             | bool           | B            | RolloutWorker.generate | reports | cut at max_tokens: no end token came by then
agent_scored          | bool           | B            | RolloutWorker.run | rewards | the agent returned a reward of the row's episode
drafted_tokens        | int64          | B            | RolloutWorker.generate | metrics | tokens drafted for it; only with speculation
accepted_tokens       | int64          | B            | RolloutWorker.generate | metrics | response tokens without a forward pass of their own
turn                  | int64          | B R          | RolloutWorker.play | advantages over turns, reports | number of the turn, from 1, that sampled a token or that its observation answers; 0 elsewhere
weight_version        | int64          | B R          | RolloutWorker.play, RolloutWorker.advance | reports | number of the weights that sampled a token, from 1; 0 on others
turns                 | int64          | B            | RolloutWorker.play | reports | number of turns of the episode
rollout_log_probs     | float32        | B R          | RolloutWorker.generate | actor, reports | log-probs while sampling
prompt_routed_experts | uint8 or int16 | B n M k      | RolloutWorker.generate, RolloutWorker.play | actor | experts that the engine sent each prompt token to; samples of a prompt share its values
routed_experts        | uint8 or int16 | B n M k      | RolloutWorker.generate, RolloutWorker.play | actor | the same for response tokens; the last one, which the engine did not read, repeats the one before
old_log_probs         | float32        | B R          | ActorWorker.log_probs | policy loss | log-probs before the update
actor_log_probs       | float32        | B R          | recipes.run.phases | reports | log-probs before the update, NaN where not known
ref_log_prob          | float32        | B R          | ReferenceWorker.log_probs | KL terms | log-probs of the reference
values                | float32        | B R          | CriticWorker.values | advantages | value of each token
token_level_rewards   | float32        | B R          | RewardWorker.score | advantages | rewards, usually at the end
token_level_scores    | float32        | B R          | recipes with a KL penalty | reports | rewards before any KL penalty
advantages            | float32        | B R          | recipes.algorithms.advantages | policy loss | advantage of each token
rollout_is_weights    | float32        | B R          | recipes.run.phases | policy loss | weight of each token for the engine's error
reward_baselines      | float32        | B            | recipes.run.phases | advantages | score of the greedy response
high_covariance       | bool           | B R          | recipes.algorithms.covariances | policy loss | tokens that are held back
returns               | float32        | B R          | recipes.algorithms.advantages | critic loss | target of the value
uid                   | object         | B            | PromptBuilder, or the recipe | engine, advantages, actor | one for each occurrence of a prompt, shared by its samples
pair                  | int64          | B            | AnswersBuilder | actor | number of the pair of answers; its rows, next to each other, are in one micro-batch
answer_key            | object         | B            | AnswersBuilder | recipes | digest of prompt, media and answer
raw_prompt_ids        | object         | B            | PromptBuilder | engine | list[int], one placeholder an image
top_log_probs         | object         | B            | RolloutWorker.generate | the caller | list of (token, log-prob) a response token, on request
multi_modal_data      | object         | B            | PromptBuilder | engine | {"image": [PIL], "video": [(frames, metadata)], "audio": [(S,)]}
multi_modal_inputs    | object         | B            | PromptBuilder | actor, reference, critic | pixel values and grids; of an episode a tuple of them, one for each turn that shows media
image_keys            | object         | B            | PromptBuilder | RolloutWorker.play | (digest, lengths) of each image's inputs, which episodes reuse; remove it if you change multi_modal_inputs
raw_prompt            | object         | B            | the data set | reports, agent loops | chat messages
data_source           | object         | B            | the data set | rewards, reports | where the row comes from
reward_model          | object         | B            | the data set | rewards | {"style", "ground_truth"}
extra_info            | object         | B            | the data set | rewards | dict of whatever else
own_columns           | object         | B            | the data set | rewards | dict of its columns but prompts and media
media_columns         | object         | B            | the data set | rewards | dict of its columns of media: {"photo": "image"}
index                 | object         | B            | the data set | reports | row number in the data set
entropys              | float32        | B R          | ActorWorker.log_probs | reports | entropy of the policy, if asked for
score                 | object         | B            | RewardWorker.score | reports | the reward function's score
acc                   | object         | B            | RewardWorker.score | reports | 1 for a right answer, if the function tells
trajectory            | object         | B            | RolloutWorker.play | advantages, reports | name of the episode, shared by its rows
end_reason            | object         | B            | RolloutWorker.play | metrics, reports | why the episode ended, see `EndReason`
actions               | object         | B            | RolloutWorker.play | reports | list[str], the text of each turn
states                | object         | B            | RolloutWorker.play | advantages over turns | list[str], a digest of the observation before each turn: its texts and pixels
info                  | object         | B            | RolloutWorker.play | recipes | numbers and texts of the environment's last info
end_message           | object         | B            | RolloutWorker.play | reports | what the environment of a failed episode did
new_row               | object         | B            | RolloutWorker.run | metrics, reports | why an agent's episode has this row; empty for its first
response_text         | object         | B            | RewardWorker.score | reports | the response without special tokens
"""  # noqa: E501

COLUMNS: dict[str, Column] = {
    column.name: column for line in _TABLE.strip().splitlines() for column in [Column(*map(str.strip, line.split("|")))]
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
