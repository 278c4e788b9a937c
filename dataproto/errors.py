"""All exceptions of this library, in one tree.

Where verl raises `AssertionError`, `ValueError` or `KeyError`, the class here inherits from that too, so that existing ``except``
clauses work. Messages name the row, column, shape or rank, and what to do.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path

from safetensors import SafetensorError


class DataProtoError(Exception):
    """The root: ``except DataProtoError`` catches every error that this library raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the message in quotes.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


# The protocol object


class InvalidColumn(DataProtoError, AssertionError, ValueError, TypeError):
    """A value cannot be a column of a batch: it has no rows, or is of the wrong type, dtype or shape."""


class RowCountMismatch(DataProtoError, AssertionError, ValueError):
    """Columns of one batch, or batches that must agree, have different numbers of rows."""


class ColumnConflict(DataProtoError, AssertionError, ValueError):
    """A name has two meanings: in two fields, in two batches, or with two values."""


class MissingColumn(DataProtoError, KeyError, AssertionError, ValueError):
    """A requested column is absent."""


class InvalidIndex(DataProtoError, IndexError, AssertionError, TypeError):
    """An index is out of range, or of a type that does not select rows."""


class IndivisibleBatch(DataProtoError, AssertionError, ValueError):
    """The number of rows does not divide into the requested parts."""


class FileFormatError(DataProtoError, ValueError):
    """A file is damaged, hostile, or of a format that this version does not read."""


class MissingPackage(DataProtoError, ModuleNotFoundError):
    """A feature needs a package that is not installed."""


# Prompts, media and models


class InvalidPrompt(DataProtoError, ValueError):
    """A prompt cannot be turned into columns: markers and media disagree, or it is too long or malformed."""


class InvalidMedia(InvalidPrompt):
    """An image or video is broken, missing, or too large."""


class InvalidChunk(InvalidPrompt):
    """A chunk is of an unknown type, broken, or not of its claimed size; the message names its number."""


class InvalidRow(DataProtoError, ValueError):
    """A row of a data set cannot be used; the message names its index and the reason."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"row {index}: {reason}")
        self.index = index
        self.reason = reason

    def __reduce__(self) -> tuple[type["InvalidRow"], tuple[int, str]]:
        return type(self), (self.index, self.reason)


class UnknownModel(DataProtoError, KeyError, ValueError):
    """No model family is registered for the model type of a checkpoint."""


class MediaMismatch(DataProtoError, ValueError):
    """The placeholder tokens of a row do not match its media."""


class UnsupportedAttention(DataProtoError, ValueError):
    """Attention got a mask that packed rows cannot express."""


# Runs


class InvalidConfig(DataProtoError, ValueError):
    """An option, or a combination of options, is invalid."""


class CheckpointError(DataProtoError, ValueError):
    """A checkpoint is missing, incomplete, or of another kind of run."""


class FileNotWritten(DataProtoError, OSError):
    """A file of a run could not be written: the disk is full, say. Names the file and the way out."""


class RewardError(DataProtoError, ValueError):
    """A reward function is missing or malformed, or did not return a score."""


class ScoreCountMismatch(RewardError):
    """A reward function returned another number of scores than it got rows, or none for a row."""


class UserFunctionFailed(DataProtoError, RuntimeError):
    """A loss, an advantage, or the agent or environment of every episode of a step raised; the message has the file and line."""


class NonFiniteLogits(DataProtoError, ArithmeticError):
    """The logits of a model are NaN or infinite; the message names the row."""


class OutOfMemory(DataProtoError, RuntimeError):
    """A device had no memory left; the message names the options that help most."""


class RequestFailed(DataProtoError, RuntimeError):
    """A request ended neither with an end token nor by length; the message names the row and the reason."""


class RunAbandoned(DataProtoError, RuntimeError):
    """Completions were requested of a run that ended because the engine started another one."""


def check_at_least(least: int, config: object, *names: str, group: str = "") -> None:
    """Raises `InvalidConfig` for the first of a configuration's values that is no number, or one that is too small; ``None`` is
    left out.
    """
    for name in names:
        value = getattr(config, name)
        is_number = value is None or isinstance(value, Real)
        if not is_number:
            raise InvalidConfig(f"{group}{name}={value!r}: must be a number, and is a {type(value).__name__}")
        if value is not None and not value >= least:
            raise InvalidConfig(f"{group}{name}={value}: must be at least {least}")


# Between ranks


class RankFailure(DataProtoError, RuntimeError):
    """A rank of a process group failed in a collective; all ranks raise this, so that none waits forever."""


class WorkerFailed(DataProtoError, RuntimeError):
    """A worker of a group died, timed out or raised; names its role, rank, node, rows and last activity."""


# What others raise


WAY_OUT = "; make room or lift the limit there, and continue with --resume, or choose another --output-dir"
"""What to do when a run cannot write its files."""


@contextlib.contextmanager
def raised_as(kind: Callable[[str], Exception], what: str, *caught: type[Exception]) -> Iterator[None]:
    """A block whose errors of the classes ``caught`` are raised as a ``kind``: ``what`` went wrong, a colon, and their message.

    >>> with raised_as(InvalidConfig, "the port cannot be read", ValueError):
    ...     int("x")
    Traceback (most recent call last):
    dataproto.errors.InvalidConfig: the port cannot be read: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except caught as error:
        raise kind(f"{what}: {error}") from error


@contextlib.contextmanager
def writing(path: Path, draft: Path | None = None, way_out: str = WAY_OUT) -> Iterator[None]:
    """A block that writes a file: names the file if the system does not let it, and removes its ``draft`` then.

    Raises:
        FileNotWritten: the block raised an `OSError`, or what safetensors raises in its place.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise FileNotWritten(f"{path} could not be written: {reason}{way_out}") from error


def replace_file(path: Path, content: bytes) -> Path:
    """Writes a whole file in the place of what was there, or nothing, and returns its path.

    Raises:
        FileNotWritten: the folder does not exist, or the disk is full, say.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path, temporary):
        temporary.write_bytes(content)
        return temporary.replace(path)


def wait_for_disk(path: Path) -> None:
    """Waits until a file, or the list of a directory's entries, is on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raises the first of the errors, if there is any, with the messages of the others as notes."""
    if errors:
        note_later(*errors)
        raise errors[0]


def note_later(first: BaseException, *later: BaseException) -> None:
    """Adds the messages of errors that came while ``first`` was handled to its notes, but no message that is its own."""
    for error in later:
        if repr(error) != repr(first):
            first.add_note(f"{LATER}{type(error).__name__}: {error}")


def later_errors(error: BaseException) -> list[str]:
    """The notes of errors that came later, each without its further lines."""
    return [note.partition("\n")[0] for note in getattr(error, "__notes__", ()) if note.startswith(LATER)]


LATER = "and "
"""Begins the note of a later error."""


def end_after(error: BaseException | None, *ends: Callable[[], object]) -> None:
    """Calls each of ``ends``, whatever the others raise; what an ``__exit__`` or an ``except`` does about ``error``.

    With an error, which the caller lets pass, those of the ends become notes of it; without one the first of theirs is raised.
    """
    found = []
    for end in ends:
        try:
            end()
        except BaseException as later:
            found.append(later)
    if error is None:
        raise_first(found)
    else:
        note_later(error, *found)


@contextlib.contextmanager
def ending(*ends: Callable[[], object]) -> Iterator[None]:
    """Calls each of ``ends`` after a block, as ``finally`` does, but the first error is the one that is raised.

    >>> def fail(error):
    ...     raise error
    >>> try:
    ...     with ending(lambda: fail(OSError("not closed")), lambda: print("closed")):
    ...         fail(ValueError("the cause"))
    ... except ValueError as error:
    ...     print(error, error.__notes__)
    closed
    the cause ['and OSError: not closed']
    """
    try:
        yield
    except BaseException as error:  # `GeneratorExit` is no error: the caller reads no further.
        end_after(None if isinstance(error, GeneratorExit) else error, *ends)
        raise
    end_after(None, *ends)


@contextlib.contextmanager
def undoing(*ends: Callable[[], object]) -> Iterator[None]:
    """Calls each of ``ends`` if a block fails; their errors become notes of the block's."""
    try:
        yield
    except BaseException as error:
        end_after(error, *ends)
        raise


@contextlib.contextmanager
def not_hiding(error: BaseException | None) -> Iterator[None]:
    """A block that must run although there is an ``error`` already, which is raised if the block fails as well."""
    try:
        yield
    except BaseException as later:
        if error is None:
            raise
        note_later(error, later)
        raise error from None


LONGEST_MESSAGE = 2000
"""Characters of an exception's message that `describe` keeps, half of them from its end."""


def describe(failure: BaseException, file: str | None = None) -> str:
    """An exception in one line: type, message, and the last line of ``file`` that it passed, or else of any file.
    Of a group of exceptions it is the first.

    >>> def half(x):
    ...     return x / 0
    >>> try:
    ...     half(1)
    ... except ZeroDivisionError as error:
    ...     describe(error, half.__code__.co_filename).partition(" (")[0]
    'ZeroDivisionError: division by zero'
    """
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    try:
        text = str(failure)
    except Exception as error:  # The class is the user's own.
        text = f"(its message cannot be made: {type(error).__name__})"
    message = " ".join(f"{type(failure).__name__}: {text}".split())
    if len(message) > LONGEST_MESSAGE:  # such as one with a picture in base64; a batch keeps it for each row
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    if isinstance(failure, SyntaxError):  # Its message has file and line.
        return message
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == file]
    if not frames:
        return message
    last = (own or frames)[-1]
    return f"{message} ({last.filename}:{last.lineno}, in {last.name})"
