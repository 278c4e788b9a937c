"""Failures of several ranks in one call: which one is the cause, how long to wait for it, and how messages describe it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dataproto.errors import DataProtoError, RankFailure, later_errors

REPORT_GRACE_S = 10.0
"""For ranks that refuse a call together, or to report the failure that a secondary one follows from."""
LIBRARY_WORDS = ("gloo", "nccl", "pair closure")
"""One of them is in each error of the collectives' library; gloo ends other operations next to one that took too long without its
name.
"""
FAILURE_GRACE_S = 2.0  # for ranks to fail alike; the others may wait for the failed rank in a collective for ever


@dataclass(frozen=True)
class Failure:
    """Why one rank's call has no result."""

    error: Exception  # what the rank raised; if it died, what the backend says about that
    died: bool = False
    text: str = ""  # the error with the traceback of the rank, where ``error`` has no notes

    @property
    def traceback(self) -> str:
        """The rank's traceback; empty for a process that died."""
        return "" if self.died else "\n".join(getattr(self.error, "__notes__", ())) or self.text


def is_secondary(error: Exception) -> bool:
    """Whether a rank failed because another one did: a `RankFailure`, or an error of the collectives' library.

    >>> is_secondary(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")), is_secondary(KeyError("x"))
    (True, False)
    >>> is_secondary(RuntimeError("Application timeout caused pair closure"))
    True
    """
    from_library = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LIBRARY_WORDS)
    return from_library or isinstance(error, RankFailure)


def grace_period(error: Exception) -> float:
    """Seconds to wait for the failures of other ranks after a rank failed with ``error``."""
    return REPORT_GRACE_S if isinstance(error, DataProtoError) or is_secondary(error) else FAILURE_GRACE_S


def root_causes(failures: Mapping[int, Failure]) -> list[int]:
    """The ranks whose failures explain the others: those that died, else those with a primary error, else all.

    >>> root_causes({0: Failure(RankFailure("rank 1: ...")), 1: Failure(KeyError("x"))})
    [1]
    """
    dead = [rank for rank, failure in failures.items() if failure.died]
    primary = [rank for rank, failure in failures.items() if not is_secondary(failure.error)]
    return sorted(dead or primary or failures)


def describe_call(call: str, phase: str | None) -> str:
    """A call and the last phase that its rank reported. The last report of a process that died may be missing.

    >>> describe_call("actor.update", "actor: sending weights")
    "'actor.update' (last phase: 'actor: sending weights')"
    """
    return repr(call) if phase in (None, call) else f"{call!r} (last phase: {phase!r})"


def describe_failure(rank_name: str, call: str, phase: str | None, failure: Failure) -> str:
    """One line: which rank failed, in which call and why, and what failed after that."""
    where = describe_call(call, phase)
    message = "; ".join([first_line(failure.error), *later_errors(failure.error)])
    if failure.died:
        return f"{rank_name} died in {where}: {message}"
    return f"{rank_name} failed in {where}: {type(failure.error).__name__}: {message}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]
