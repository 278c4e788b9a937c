"""Rewards of whole groups while the engine decodes the others.

Reward functions may use signals, event loops and other things of the main thread, so they stay in the calling thread, and the
engine decodes in another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np

from dataproto import DataProto
from dataproto.vlm import VLMFamily
from rollout.engine import Completion, SamplingParams
from rollout.responses import attach_responses
from workers.roles.reward import RewardWorker

Results = list[Mapping[str, float] | None]
"""What the reward function returned for each row; ``None`` for rows that it has not scored."""


class _Decoding:
    """A thread that decodes, and what has finished until now."""

    def __init__(self, decode: Callable[[], Iterator[Completion]]) -> None:
        self._decode = decode
        self._found: SimpleQueue[Completion | None] = SimpleQueue()
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="decoding")
        self.running = True

    def __enter__(self) -> "_Decoding":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # after an error: it ends with the next completion
        self._thread.join()

    def _run(self) -> None:
        try:
            for completion in self._decode():
                self._found.put(completion)
                if self._stop.is_set():
                    break
        except BaseException as error:
            self._error = error
        self._found.put(None)

    def finished(self) -> list[Completion]:
        """Waits for completions and returns all that are there; none at the end. Raises what decoding has raised."""
        found = [self._found.get()]
        while not self._found.empty():
            found.append(self._found.get())
        if found[-1] is None:
            self.running = False
            if self._error is not None:
                raise self._error
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class EarlyRewards:
    """Scores the groups of a rollout worker."""

    reward: RewardWorker
    family: VLMFamily
    pad_token_id: int

    def decode(
        self, decode: Callable[[], Iterator[Completion]], prompts: DataProto, sampling: SamplingParams
    ) -> tuple[list[Completion], Results]:
        """All completions of ``decode()``, and the results of the groups that finished before the last one.

        What has finished while other groups were scored is scored together. Groups for which the function fails have no
        results: `RewardWorker.score` calls it again, and its errors are raised there.
        """
        completions: list[Completion] = []
        groups: dict[int, list[Completion]] = {}
        results: Results = [None] * (len(prompts) * sampling.n)
        with _Decoding(decode) as decoding:
            while decoding.running:
                found = decoding.finished()
                completions += found
                for each in found:
                    groups.setdefault(each.request // sampling.n, []).append(each)
                whole = [prompt for prompt, samples in groups.items() if len(samples) == sampling.n]
                if whole and decoding.running:
                    scored = [each for prompt in whole for each in groups.pop(prompt)]
                    scored.sort(key=lambda each: each.request)
                    for each, result in zip(scored, self._results(prompts, scored, sampling), strict=True):
                        results[each.request] = result
        return completions, results

    def _results(self, prompts: DataProto, completions: Sequence[Completion], sampling: SamplingParams) -> Results:
        rows = prompts[np.array([each.request // sampling.n for each in completions])]
        numbered = [replace(each, request=place) for place, each in enumerate(completions)]
        data = attach_responses(rows, numbered, replace(sampling, n=1), self.family, self.pad_token_id)
        try:
            found: list[Any] = list(self.reward.results(data, self.reward.decode(data)))
        except Exception:
            found = []
        return found if len(found) == len(completions) else [None] * len(completions)
