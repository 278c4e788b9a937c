"""Every exception a user of this library can meet, in one tree.

A class that stands where verl raised `AssertionError`, `ValueError` or `KeyError` inherits from that too, so that existing
``except`` clauses keep working. Messages name the row, column, shape or rank, and the way out.
"""


class DataProtoError(Exception):
    """The root: ``except DataProtoError`` catches whatever this library raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


# The protocol object


class InvalidColumn(DataProtoError, AssertionError, ValueError, TypeError):
    """A column is not of a kind that a batch can hold (no rows, a scalar, the wrong type)."""


class RowCountMismatch(DataProtoError, AssertionError, ValueError):
    """Columns of one batch, or batches that must agree, have different numbers of rows."""


class ColumnConflict(DataProtoError, AssertionError, ValueError):
    """One name stands for two different things: in two fields, in two batches, or with two values."""


class MissingColumn(DataProtoError, KeyError, AssertionError, ValueError):
    """A column that is asked for is absent."""


class InvalidIndex(DataProtoError, IndexError, AssertionError, TypeError):
    """An index is out of range or of a kind that cannot select rows."""


class IndivisibleBatch(DataProtoError, AssertionError, ValueError):
    """The number of rows does not divide into the parts asked for."""


class FileFormatError(DataProtoError, ValueError):
    """A file is damaged, hostile, or of a format that may not be read."""


class MissingPackage(DataProtoError, ModuleNotFoundError):
    """A package that is not installed is needed for what was asked."""


# Prompts, media and models


class InvalidPrompt(DataProtoError, ValueError):
    """A prompt cannot be turned into columns (markers and media disagree, too long, malformed)."""


class InvalidMedia(InvalidPrompt):
    """An image or video is broken, missing or of absurd size."""


class InvalidChunk(InvalidPrompt):
    """A chunk of an input is of an unknown kind, broken, or not of the size it claims; the message names its number."""


class InvalidRow(DataProtoError, ValueError):
    """A row of a data set cannot be used; the message names its index and the reason."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"row {index}: {reason}")
        self.index = index
        self.reason = reason

    def __reduce__(self) -> tuple[type["InvalidRow"], tuple[int, str]]:
        return type(self), (self.index, self.reason)


class UnknownModel(DataProtoError, KeyError, ValueError):
    """No model family is registered for a checkpoint's model type."""


class MediaMismatch(DataProtoError, ValueError):
    """Placeholder tokens in a row and the media that belong to it do not match."""


class UnsupportedAttention(DataProtoError, ValueError):
    """Attention was asked for a mask that the packed path cannot express."""


# Runs


class InvalidConfig(DataProtoError, ValueError):
    """Options that are impossible, alone or together."""


class CheckpointError(DataProtoError, ValueError):
    """A checkpoint is missing, incomplete, or belongs to another kind of run."""


class RewardError(DataProtoError, ValueError):
    """A reward function is missing, malformed, or returned something that is not a score."""


class NonFiniteLogits(DataProtoError, ArithmeticError):
    """A model's logits are NaN or infinite, so nothing can be sampled from them or scored; the message names the row."""


class RequestFailed(DataProtoError, RuntimeError):
    """An engine ended a request otherwise than by an end token or by length; the message names the row and the reason."""


class RunAbandoned(DataProtoError, RuntimeError):
    """Completions were asked for after the engine had begun another run, which ends the one before."""


# Between ranks


class RankFailure(DataProtoError, RuntimeError):
    """A rank of a process group could not take its part in a collective; all ranks raise it, so that none waits for ever."""


class WorkerFailed(DataProtoError, RuntimeError):
    """A worker of a group died, ran out of time or raised; names role, rank, node, rows and what it was last doing."""
