"""Adapters that make reward functions of verl's, EasyR1's and TRL's functions, of files that users name, and of servers."""

import asyncio
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np

from dataproto.errors import RewardError, ScoreCountMismatch, describe
from recipes.algorithms.function_files import load_named_function, source_file
from recipes.rewards.geometry3k import geo3k_reward
from recipes.rewards.reward_servers import RewardServer
from recipes.rewards.sequence_classifier import SequenceClassifier
from workers.roles.reward import RewardFunction, RewardRow, check_ready, check_results, finite_number, uses_device

T = TypeVar("T")

SIGNATURES = (
    "compute_score(data_source, solution_str, ground_truth, extra_info) as in verl, "
    "compute_score(reward_inputs) or compute_score(reward_input) as in EasyR1, "
    "reward_func(prompts, completions, **columns) as in TRL, or score_rows(rows) of RewardRow"
)
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of verl's function."""
_GATHERING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SHOWN = 200
"""Characters of a response that an error message shows."""


def load_reward(
    name: str | Sequence[str], here: bool = False, weights: Sequence[float] | None = None
) -> RewardFunction:
    """The reward function that a command line names, or the weighted sum of several.

    Args:
        name: ``geo3k``, ``FILE.py:FUNCTION`` with one of the known signatures (see `as_reward_function`), the URL of a server
            (see `remote_reward`), or ``classifier:MODEL`` (see `SequenceClassifier`); or several of them.
        here: whether this process will call it, so that it can be checked now (see `check_ready`).
        weights: one for each name; by default each counts once.

    Raises:
        RewardError: the file or the function does not exist, or its signature is unknown; or its server cannot be reached.
    """
    names = [name] if isinstance(name, str) else list(name)
    reward: RewardFunction
    if len(names) == 1 and weights is None:
        reward = _named_reward(names[0])
    else:
        labels = _labels(names)
        if twice := [label for label, count in Counter(labels).items() if count > 1]:
            raise RewardError(f"--reward names {twice[0]} twice: leave one out, or rename its file")
        parts = {label: _named_reward(each) for label, each in zip(labels, names, strict=True)}
        reward = WeightedRewards(parts, (1.0,) * len(names) if weights is None else tuple(weights))
    if here:
        check_ready(reward)
    return reward


def _named_reward(name: str) -> RewardFunction:
    if name.startswith(("http://", "https://")):
        return remote_reward(name)
    if name.startswith("classifier:"):
        return SequenceClassifier(name.removeprefix("classifier:"))
    return geo3k_reward if name == "geo3k" else as_reward_function(load_named_function(name, "reward", RewardError))


def _labels(names: Sequence[str]) -> list[str]:
    """What the parts of a reward are called: a function by its name, and with its file where that is not enough.

    >>> _labels(["mine.py:near", "rules/form.py:score", "classifier:org/judge"]), _labels(["a.py:f", "b.py:f"])
    (['near', 'form/score', 'judge'], ['a/f', 'b/f'])
    """
    short = [PurePath(name.rpartition(":")[2]).name for name in names]
    taken = {name for name, count in Counter([*short, "score"]).items() if count > 1}
    return [
        f"{PurePath(name.rpartition(':')[0]).stem}/{label}" if label in taken else label
        for name, label in zip(names, short, strict=True)
    ]


@dataclass(frozen=True)
class WeightedRewards:
    """The sum of several rewards, each times its weight; the score of each is also a number under its name.

    >>> halves = WeightedRewards({"one": lambda rows: [{"score": 1.0}], "two": lambda rows: [{"score": 3.0}]}, (0.5, 0.5))
    >>> halves([RewardRow("", "")])
    [{'score': 2.0, 'one': 1.0, 'two': 3.0}]
    """

    parts: Mapping[str, RewardFunction]
    weights: Sequence[float]

    @property
    def uses_device(self) -> bool:
        return any(map(uses_device, self.parts.values()))

    def check(self) -> None:
        for part in self.parts.values():
            check_ready(part)

    def check_columns(self, row: RewardRow) -> None:
        for part in self.parts.values():
            if callable(check := getattr(part, "check_columns", None)):
                check(row)

    def __call__(self, rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        """Raises `RewardError` if two rewards return a number of the same name."""
        joined: list[dict[str, float]] = [{"score": 0.0} for _ in rows]
        for (name, part), weight in zip(self.parts.items(), self.weights, strict=True):
            results = part(rows)
            check_results(results, len(rows))
            for numbers, result in zip(joined, results, strict=True):
                own = {name: result["score"]} | {each: value for each, value in result.items() if each != "score"}
                if twice := sorted(numbers.keys() & own.keys()):
                    raise RewardError(
                        f"the reward {name} returns {', '.join(twice)}, as another one does: give its numbers other names"
                    )
                numbers |= own | {"score": numbers["score"] + weight * result["score"]}
        return joined


def parts_of(reward: RewardFunction | None) -> list[RewardFunction | None]:
    """The rewards of which one is the weighted sum; of another one itself."""
    return [*reward.parts.values()] if isinstance(reward, WeightedRewards) else [reward]


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Adapts a function according to the names of its arguments: verl's, EasyR1's, TRL's, or one function of all rows.

    A function in a module that has ``REWARD_TYPE`` is EasyR1's, whatever its argument is named. The attributes ``uses_device``
    and ``check`` of the function stay, and the function itself is the attribute ``function``.

    Raises:
        RewardError: the signature is unknown, or has a further argument without a default.
    """
    found = _adapted(function)
    vars(found).update(uses_device=uses_device(function), function=function, check=partial(check_ready, function))
    return found


def _adapted(function: Callable[..., Any]) -> RewardFunction:
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"{function!r} is not a function with a readable signature") from error
    if "solution_str" in names:
        _check_arguments(function, VERL)
        return from_verl(function)
    if "completions" in names:
        return from_trl(function)
    if _easyr1_type(function, names) is not None:
        _check_arguments(function, [next(iter(names), "reward_inputs")])
        return from_easyr1(function)
    if "rows" in names:
        _check_arguments(function, ["rows"])
        return lambda rows: _read_all(_call_once(function, {"rows": rows}, rows), rows, function)
    raise RewardError(f"{_name(function)}({', '.join(names)}) is not a reward function: expected {SIGNATURES}")


def from_verl(function: Callable[..., Any]) -> RewardFunction:
    """Adapts verl's ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict``, also ``async``.

    A function without ``**kwargs`` gets the arguments that it names. A dict must have ``score``. Its other numbers become
    columns; other values are ignored.
    """

    def score_rows(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        calls = [
            _taken(function, {name: getattr(row, name) for name in VERL} | {"extra_info": dict(row.extra_info or {})})
            for row in rows
        ]
        results = _call_all(function, calls, [_place(number, row) for number, row in enumerate(rows)])
        return _read_all(results, rows, function)

    return score_rows


def from_easyr1(function: Callable[..., Any]) -> RewardFunction:
    """Adapts EasyR1's ``compute_score``, in the two forms that its reward managers call (``verl/workers/reward/function.py``).

    * batch, the default: ``compute_score(reward_inputs: list[dict]) -> list[dict]``
    * sequential, ``REWARD_TYPE = "sequential"`` in its module: ``compute_score(reward_input: dict) -> dict``

    An input has ``response`` (text), ``response_length`` (tokens) and ``ground_truth``. A score has ``overall``, which becomes
    the score, and may have ``accuracy``, which becomes the column ``acc``, and other numbers, which become columns. Further
    arguments of the function, such as ``format_weight``, keep their defaults.

    Raises:
        RewardError: when called, the function fails, or does not return an ``overall`` for each row.
    """
    names = inspect.signature(function).parameters
    argument, sequential = next(iter(names), "reward_inputs"), _easyr1_type(function, names) == "sequential"

    def score_rows(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        inputs = [
            {"response": row.solution_str, "response_length": row.response_length, "ground_truth": row.ground_truth}
            for row in rows
        ]
        if sequential:
            calls, places = [{argument: each} for each in inputs], [f"row {number}" for number in range(len(rows))]
            results = _call_all(function, calls, places)
        else:
            results = _call_once(function, {argument: inputs}, rows)
        if isinstance(results, Sequence):
            results = [_overall(result, number, function) for number, result in enumerate(results)]
        return _read_all(results, rows, function)

    return score_rows


def _overall(result: Any, row: int, function: Callable[..., Any]) -> dict[str, Any]:
    """EasyR1's score under the names of this project."""
    if not isinstance(result, Mapping) or "overall" not in result:
        raise RewardError(f"row {row}: {_name(function)} returned {result!r}, not a dict with 'overall' as in EasyR1")
    named = {"acc" if name == "accuracy" else name: value for name, value in result.items() if name != "overall"}
    return named | {"score": result["overall"]}


def _easyr1_type(function: Callable[..., Any], names: Iterable[str]) -> str | None:
    """``batch`` or ``sequential`` for a function in EasyR1's form, else `None`."""
    given = getattr(sys.modules.get(getattr(function, "__module__", "")), "REWARD_TYPE", None)
    if given in ("batch", "sequential"):
        return str(given)
    return "batch" if "reward_inputs" in names else "sequential" if "reward_input" in names else None


def from_trl(function: Callable[..., Any]) -> RewardFunction:
    """Adapts TRL's ``reward_func(prompts, completions, **columns) -> list[float]``, also ``async``.

    If prompts are messages, completions are messages too (``[{"role": "assistant", "content": ...}]``), else strings. The
    columns are those of the data set by their own names, pictures loaded (``solution``, ``image``, ...), ``data_source``,
    ``ground_truth``, ``extra_info`` and the items of the rows' ``extra_info`` (``answer``, ...). A function without ``**columns``
    gets the columns that it names.
    """
    return _FromTRL(function)


@dataclass(frozen=True)
class _FromTRL:
    """A function in TRL's form."""

    function: Callable[..., Any]

    def check_columns(self, row: RewardRow) -> None:
        """Raises `RewardError` if the function needs a column that rows such as this one do not have."""
        given = self._columns([row])
        if lacking := _lacking(self.function, given):
            own, others = ", ".join(sorted(row.columns)), ", ".join(sorted(given.keys() - row.columns.keys()))
            raise RewardError(
                f"the reward {_name(self.function)} needs {', '.join(lacking)}, which the data does not have: name an argument "
                f"as its column, or give it a default; its columns are {own or 'unknown'}, and every reward gets {others}"
            )

    def __call__(self, rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        if not rows:
            return []
        given = _taken(self.function, self._columns(rows))
        try:
            results = _call_once(self.function, given, rows)
        except RewardError as error:
            if "'list' object" in str(error) and isinstance(given["completions"][0], list):
                raise RewardError(
                    f"{error}: a completion is a list of messages, its text completion[0]['content']"
                ) from error
            raise
        return _read_all(results, rows, self.function)

    def _columns(self, rows: Sequence[RewardRow]) -> dict[str, list[Any]]:
        common = ("data_source", "ground_truth", "extra_info")
        found = [
            {**(row.extra_info or {}), **{name: getattr(row, name) for name in common}, **row.columns} for row in rows
        ]
        columns = {
            name: [each.get(name) for each in found] for name in sorted({name for each in found for name in each})
        }
        return columns | {
            "prompts": ["" if row.prompt is None else row.prompt for row in rows],
            "completions": [_completion(row) for row in rows],
        }


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def _lacking(function: Callable[..., Any], given: Iterable[str]) -> list[str]:
    """The function's arguments without a default that are not given."""
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in _GATHERING]
    return [name for name in needed if name not in {*given}]


def _check_arguments(function: Callable[..., Any], given: Sequence[str]) -> None:
    if lacking := _lacking(function, given):
        raise RewardError(
            f"the reward {_name(function)} needs {', '.join(lacking)}, but is called with {', '.join(given)}: give the other "
            "arguments defaults"
        )


def remote_reward(url: str, timeout_s: float = 120.0) -> RewardServer:
    """A reward function that a server computes over HTTP; see `RewardServer`.

    Raises:
        RewardError: ``url`` is not an HTTP address; when called, the server rejects the request, cannot be reached, or
            returns another answer.
    """
    return RewardServer(url, timeout_s)


def read_score(result: Any, place: str, function: Callable[..., Any]) -> dict[str, float]:
    """Converts the result of a function for one row, which ``place`` names, to ``{"score": float, ...}``.

    Raises:
        RewardError: the score, or ``acc``, is not finite as a float32; names the row.
        ScoreCountMismatch: there is no score.
    """
    if result is None:
        raise ScoreCountMismatch(
            f"{place}: {_name(function)} returned None, which is no finite number: return 0 where it has nothing to judge"
        )
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    for name in ("score", *({"acc"} & numbers.keys())):
        if finite_number(numbers, name) is None:
            kind = "a score" if name == "score" else "an accuracy ('acc')"
            kind = kind if name in values else "the key 'score' is missing, which"
            raise RewardError(f"{place}: {_name(function)} returned {result!r}; {kind} must be a finite number")
    return numbers


def _read_all(results: Any, rows: Sequence[RewardRow], function: Callable[..., Any]) -> list[dict[str, float]]:
    if isinstance(results, (Mapping, Set)):
        raise RewardError(
            f"{_name(function)} returned {results!r}, not a list with the score of each row, in their order"
        )
    try:
        scores = list(results)
    except TypeError as error:
        kind = ScoreCountMismatch if results is None else RewardError
        raise kind(f"{_name(function)} returned {results!r}, not a list of scores") from error
    if len(scores) != len(rows):
        raise ScoreCountMismatch(f"{_name(function)} returned {len(scores)} scores for {len(rows)} rows")
    return [read_score(score, _place(number, rows[number]), function) for number, score in enumerate(scores)]


def _completion(row: RewardRow) -> Any:
    if row.prompt is None or isinstance(row.prompt, str):
        return row.solution_str
    return [{"role": "assistant", "content": row.solution_str}]


def _call_once(function: Callable[..., Any], arguments: Mapping[str, Any], rows: Sequence[RewardRow]) -> Any:
    """What a function returns for all rows together."""
    (results,) = _call_all(function, [arguments], [f"rows 0 to {len(rows) - 1}"])
    return results


def _call_all(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[Any]:
    """The results of all calls; coroutines run concurrently. Raises `RewardError` with the place of the first failure."""
    results: list[Any] = []
    for call, place in zip(calls, places, strict=True):
        try:
            results.append(function(**call))
        except (Exception, SystemExit) as error:
            raise _failure(function, place, error) from error
    if not any(map(inspect.isawaitable, results)):
        return results

    async def outcome(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def gather() -> list[Any]:
        return await asyncio.gather(*map(outcome, results), return_exceptions=True)

    results = _run_here(gather())
    for result, place in zip(results, places, strict=True):
        if isinstance(result, BaseException):
            raise _failure(function, place, result) from result
    return results


def _run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in this thread, because signals such as those of math_verify's time limit need the main one.

    An event loop that runs here already, as in a notebook, waits meanwhile, as it does for functions that are not async.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)


def _failure(function: Callable[..., Any], place: str, error: BaseException) -> RewardError:
    return RewardError(f"{place}: {_name(function)} raised {describe(error, source_file(function))}")


def _place(number: int, row: RewardRow) -> str:
    """Number, uid and response of a row, for messages."""
    uid = f"uid {row.uid}, " if row.uid else ""
    cut = " ..." if len(row.solution_str) > SHOWN else ""
    return f"row {number} ({uid}response {row.solution_str[:SHOWN]!r}{cut})"


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's scalars
        value = value.item()
    try:
        return float(value) if isinstance(value, (bool, int, float, np.number)) else None
    except OverflowError:  # an int beyond the largest float
        return math.inf if value > 0 else -math.inf


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
