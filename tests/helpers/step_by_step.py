"""A program that trains by the single operations of the roles, from chunks: arguments are data, results plain numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dataproto.chunks import Datum, read_datum, read_model_input
from dataproto_server.engine.datum_losses import DATUM_LOSSES
from rollout.engine import SamplingParams
from rollout.prompts import ChunkRenderer
from workers import Roles
from workers.model.model_config import AdamParams
from workers.training.forward_pass import LossFn


def by_name(name: str) -> LossFn:
    formula, columns = DATUM_LOSSES[name]
    return lambda outputs, data: (formula(outputs.log_probs, *(data[column] for column in columns)), {})


SAMPLED = ("responses", "rollout_log_probs")


@dataclass(frozen=True)
class Passed:
    metrics: Mapping[str, float]
    log_probs: list[Tensor]  # of each datum

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    truncated: bool


class Program:
    """The roles of a run and the renderer of its chunks. Samples come at first from the initial weights."""

    def __init__(self, roles: Roles, renderer: ChunkRenderer) -> None:
        self.roles, self.renderer = roles, renderer
        roles.save_weights_for_sampler()

    def forward(self, data: Sequence[Any], loss: str | LossFn = "cross_entropy") -> Passed:
        return self._pass(self.roles.actor.forward, data, loss)

    def forward_backward(self, data: Sequence[Any], loss: str | LossFn = "cross_entropy") -> Passed:
        return self._pass(self.roles.actor.forward_backward, data, loss)

    def _pass(self, method: Any, data: Sequence[Any], loss: str | LossFn) -> Passed:
        loss_fn = by_name(loss) if isinstance(loss, str) else loss
        passed = method(self.renderer.rows(data), loss_fn)
        lengths = [len(read_datum(datum).loss_fn_inputs["target_tokens"]) for datum in data]
        return Passed(passed.metrics, [row[:length] for row, length in zip(passed.log_probs, lengths, strict=True)])

    def optim_step(self, params: Any) -> dict[str, float]:
        return self.roles.actor.optim_step(AdamParams.of(params))

    def compute_logprobs(self, prompt: Any) -> list[float | None]:
        model_input = read_model_input(prompt)
        targets = [*self.renderer.token_ids(model_input)[1:], 0]
        rows = self.renderer.rows([Datum(model_input, {"target_tokens": targets})])
        found = self.roles.actor.compute_logprobs(rows)[0, : len(targets)].tolist()
        return [None if math.isnan(value) else value for value in found]

    def sample(self, prompt: Any, sampling: SamplingParams) -> list[Sampled]:
        prompts = self.renderer.prompts([prompt])
        prompts["uid"] = np.array(["prompt"], dtype=object)  # the samples depend on the seed alone
        data = self.roles.sample(prompts, sampling)
        lengths = data["response_mask"].sum(1).tolist()
        columns = [[values[:n].tolist() for values, n in zip(data[name], lengths)] for name in SAMPLED]
        return [Sampled(*each) for each in zip(*columns, data["truncated"].tolist(), strict=True)]

    def save_state(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.roles.actor.save(path.absolute())

    def load_state(self, path: Path) -> None:
        self.roles.actor.load(path.absolute())
