"""How failures of several ranks in one call are told apart: which of them is the cause, and how long to wait for it."""

from collections.abc import Sequence

from dataproto.errors import DataProtoError, RankFailure

GRACE_S = 10.0  # that ranks have to refuse a call together, or to tell of the failure that another rank's comes of
ALIKE_S = 2.0  # that ranks have to fail alike; those that do not may wait for the failed one in a collective, for ever


def tells_of_another(cause: Exception) -> bool:
    """Whether a rank failed because of another: by our own word, or by that of a collective's library.

    >>> tells_of_another(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")), tells_of_another(KeyError("x"))
    (True, False)
    """
    library = isinstance(cause, RuntimeError) and any(name in str(cause).lower() for name in ("gloo", "nccl"))
    return library or isinstance(cause, RankFailure)


def patience(cause: Exception) -> float:
    """Seconds in which the other ranks may still tell of theirs, once one has failed."""
    return GRACE_S if isinstance(cause, DataProtoError) or tells_of_another(cause) else ALIKE_S


def place_of(what: str, phase: str | None) -> str:
    """A call, and what its rank last told of; the last word of one that died may not have come through."""
    return repr(what) if phase in (None, what) else f"{what!r} (last told of: {phase!r})"


def first_line(error: BaseException) -> str:
    """What an error says, without what follows."""
    return (str(error).strip().splitlines() or [""])[0]


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raises the first of the errors, if there is one, with what the others say as notes."""
    for other in errors[1:]:
        errors[0].add_note(f"and {type(other).__name__}: {other}")
    if errors:
        raise errors[0]
