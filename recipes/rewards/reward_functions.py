"""Functions that users already have, as reward functions here: verl's, TRL's, and files named on a command line."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dataproto.errors import RewardError
from recipes.algorithms.function_files import load_named_function
from workers.roles.reward import RewardFunction, RewardRow

SIGNATURES = (
    "compute_score(data_source, solution_str, ground_truth, extra_info) as in verl, "
    "reward_func(prompts, completions, **columns) as in TRL, or score_rows(rows) of RewardRow"
)


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Adapt a function by the names of its arguments. Raises `RewardError` if they are of no known kind."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"{function!r} is not a function with a readable signature") from error
    if "solution_str" in names:
        return from_verl(function)
    if "completions" in names:
        return from_trl(function)
    if "rows" in names:
        return _from_rows(function)
    raise RewardError(f"{_name(function)}({', '.join(names)}) is no reward function: expected {SIGNATURES}")


def from_verl(function: Callable[..., Any]) -> RewardFunction:
    """verl's ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict``, also ``async``.

    A dict must have ``score``; its other numbers become columns, whatever else it holds is left out.
    """

    def score_rows(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        calls = [
            {
                "data_source": row.data_source,
                "solution_str": row.solution_str,
                "ground_truth": row.ground_truth,
                "extra_info": dict(row.extra_info or {}),
            }
            for row in rows
        ]
        results = _call_all(function, calls, [f"row {number}" for number in range(len(rows))])
        return [read_score(result, number, function) for number, result in enumerate(results)]

    return score_rows


def from_trl(function: Callable[..., Any]) -> RewardFunction:
    """TRL's ``reward_func(prompts, completions, **columns) -> list[float]``, also ``async``.

    Completions are messages where prompts are (``[{"role": "assistant", "content": ...}]``), else strings. Columns are
    ``data_source``, ``ground_truth``, ``extra_info`` and what the rows' ``extra_info`` holds (``answer``, ...); a function
    without ``**`` gets those it names.
    """

    def score_rows(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        if not rows:
            return []
        columns: dict[str, Any] = {}
        for name in sorted({name for row in rows for name in row.extra_info or {}}):
            columns[name] = [(row.extra_info or {}).get(name) for row in rows]
        for name in ("data_source", "ground_truth", "extra_info"):
            columns[name] = [getattr(row, name) for row in rows]
        columns["prompts"] = ["" if row.prompt is None else row.prompt for row in rows]
        columns["completions"] = [_completion(row) for row in rows]
        parameters = inspect.signature(function).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            columns = {name: column for name, column in columns.items() if name in parameters}
        (results,) = _call_all(function, [columns], [f"rows 0 to {len(rows) - 1}"])
        return _read_all(results, rows, function)

    return score_rows


def load_function(name: str) -> Callable[..., Any]:
    """The reward function that ``file.py:function`` names. Raises `RewardError`."""
    return load_named_function(name, "reward", RewardError)


def read_score(result: Any, row: int, function: Callable[..., Any]) -> dict[str, float]:
    """What a function returned for a row, as ``{"score": float, ...}``. Raises `RewardError` naming the row."""
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if not math.isfinite(numbers.get("score", math.nan)):
        raise RewardError(f"row {row}: {_name(function)} returned {result!r}; a score must be a finite number")
    return numbers


def _from_rows(function: Callable[..., Any]) -> RewardFunction:
    def score_rows(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        (results,) = _call_all(function, [{"rows": rows}], [f"rows 0 to {len(rows) - 1}"])
        return _read_all(results, rows, function)

    return score_rows


def _read_all(results: Any, rows: Sequence[RewardRow], function: Callable[..., Any]) -> list[dict[str, float]]:
    try:
        scores = list(results)
    except TypeError as error:
        raise RewardError(f"{_name(function)} returned {results!r}, not a list of scores") from error
    if len(scores) != len(rows):
        raise RewardError(f"{_name(function)} returned {len(scores)} scores for {len(rows)} rows")
    return [read_score(score, number, function) for number, score in enumerate(scores)]


def _completion(row: RewardRow) -> Any:
    if row.prompt is None or isinstance(row.prompt, str):
        return row.solution_str
    return [{"role": "assistant", "content": row.solution_str}]


def _call_all(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[Any]:
    """Results of all calls, coroutines run together. Raises `RewardError` with the place of the first that fails."""
    results: list[Any] = []
    for call, place in zip(calls, places, strict=True):
        try:
            results.append(function(**call))
        except Exception as error:
            raise _failure(function, place, error) from error
    if not any(inspect.isawaitable(result) for result in results):
        return results

    async def gather() -> list[Any]:
        waiting = [result if inspect.isawaitable(result) else _immediate(result) for result in results]
        return await asyncio.gather(*waiting, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, since this one may already run a loop
        results = pool.submit(asyncio.run, gather()).result()
    for result, place in zip(results, places, strict=True):
        if isinstance(result, BaseException):
            raise _failure(function, place, result) from result
    return results


async def _immediate(value: Any) -> Any:
    return value


def _failure(function: Callable[..., Any], place: str, error: BaseException) -> RewardError:
    return RewardError(f"{place}: {_name(function)} raised {type(error).__name__}: {error}")


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's scalars
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float, np.number)) else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
