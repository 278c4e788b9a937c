"""Requests on an engine that has `generate` alone: those that wait are generated together, by one poll."""

from dataclasses import replace
from itertools import groupby
from typing import Any

from rollout.engine import Completion, Request, SamplingParams


class TurnByTurn:
    """`rollout.engine.RequestEngine` on ``engine.generate``; nothing is kept between turns."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._waiting: dict[int, tuple[Request, SamplingParams]] = {}
        self._next = 0

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        self._next += 1
        self._waiting[self._next] = request, replace(sampling, n=1)
        return self._next

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        return self.submit(request, sampling)

    def abort(self, number: int) -> Completion | None:
        self._waiting.pop(number, None)
        return None

    def poll(self) -> list[Completion]:
        done = []
        waiting, self._waiting = self._waiting, {}
        for sampling, group in groupby(waiting.items(), key=lambda item: item[1][1]):
            numbers, requests = zip(*((number, request) for number, (request, _) in group))
            found = self.engine.generate(requests, sampling)
            done += [replace(each, request=numbers[each.request]) for each in found]
        return done

    @property
    def unfinished(self) -> int:
        return len(self._waiting)
