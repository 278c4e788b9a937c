"""One step off policy: the engines generate the next batch, on separate devices, while the actor learns from this one.

The engines start on the next prompts before the update of this batch, and take the new weights when both are done. So a batch is
at most one update old. Its ``old_log_probs`` are those of the policy that sampled it, so the ratio in the loss corrects for
that update.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dataproto import DataProto
from recipes.run.loop import Loader, Measure, measure_rollouts
from recipes.run.phases import Progression
from rollout.engine import SamplingParams
from workers import Roles


class LookAhead:
    """A loader that can show its next batch early. Its saved position counts only the batches that it has returned."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.current: DataProto | None = None
        self._next: DataProto | None = None
        self._position = loader.state_dict()

    @property
    def skipped(self) -> dict[int, str]:
        return self.loader.skipped

    def peek(self) -> DataProto:
        """The next batch, which the next call of ``next`` returns."""
        if self._next is None:
            self._position = self.loader.state_dict()
            self._next = next(self.loader)
        return self._next

    def __next__(self) -> DataProto:
        self.current, self._next = self.peek(), None
        self._position = self.loader.state_dict()
        return self.current

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.current = self._next = None
        self._position = self.loader.state_dict()


class RolloutAhead:
    """A rollout group that generates for the loader's next batch while the caller learns from the current one."""

    def __init__(self, group: Any, loader: LookAhead, goes_on: Callable[[], bool] = lambda: True) -> None:
        """``goes_on`` tells whether another step follows the current one."""
        self.group, self.loader, self.goes_on = group, loader, goes_on
        self.staleness = 0  # updates between the weights that sampled the last batch and those that learn from it
        self._ahead: tuple[DataProto, Any] | None = None  # prompts and the future of their rollouts

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Responses to the prompts, as of the group.

        For the loader's current prompts they may be ready, and generation for the next prompts begins.
        """
        if prompts is not self.loader.current:
            data: DataProto = self.group.generate(prompts, sampling)
            return data
        ready = self._ahead is not None and self._ahead[0] is prompts
        future = self._ahead[1] if ready and self._ahead else self.group.submit("generate", prompts, sampling)
        self._ahead, self.staleness = None, int(ready)
        data = future.result()
        data["old_log_probs"] = data["rollout_log_probs"]
        if self.goes_on():
            following = self.loader.peek()
            self._ahead = following, self.group.submit("generate", following, sampling)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def generate_ahead(roles: Roles, loader: Loader, progression: Progression, steps: int) -> tuple[LookAhead, Measure]:
    """Replaces the rollout group by a `RolloutAhead` for a run of ``steps``.

    Returns:
        The loader of the run, and the measure that adds ``training/staleness``.
    """
    batches = LookAhead(loader)
    group = RolloutAhead(roles.rollout, batches, lambda: progression.steps + 1 < steps)
    roles.rollout = group

    def measure(data: DataProto, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
        return {"training/staleness": group.staleness} | measure_rollouts(data, metrics, devices)

    return batches, measure
