"""Rollout of the next batch while this one is learned from, on devices of its own: one step off policy.

The engines start on the next prompts before the update, with the weights of the last update but one; they take the new ones
when both are done. So a batch is at most one update old, its ``old_log_probs`` are those of the policy that sampled it, and the
loss's ratio corrects for what has changed since.
"""

from collections.abc import Callable
from typing import Any

from dataproto import DataProto
from recipes.run.loop import Loader
from rollout.engine import SamplingParams


class LookAhead:
    """A loader that shows its next batch before it is due. Its saved position is that of what has been handed out."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.current: DataProto | None = None
        self._next: DataProto | None = None
        self._position = loader.state_dict()

    @property
    def skipped(self) -> dict[int, str]:
        return self.loader.skipped

    def peek(self) -> DataProto:
        """The batch that comes next."""
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
        """``goes_on`` says whether there is a step after the one that generates now."""
        self.group, self.loader, self.goes_on = group, loader, goes_on
        self.staleness = 0  # updates between the weights that sampled the last batch and those that learn from it
        self._ahead: tuple[DataProto, Any] | None = None  # prompts and the future of their rollouts

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """As the group's; the loader's current prompts may have been generated for already, and the next ones begin."""
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
