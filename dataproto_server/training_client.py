"""Training driven step by step by a program, as with the Tinker API: its objects are arguments, results are plain values.

with launch_supervised(config, model_path) as roles:
    client = TrainingClient(roles, ChunkRenderer(builder))
    client.forward_backward(data, "importance_sampling")
    client.optim_step(tinker.AdamParams(learning_rate=1e-4))
    client.save_weights_for_sampler()
    client.sample(prompt, num_samples=4, sampling_params=tinker.SamplingParams(max_tokens=64))
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from dataproto.chunks import Datum, read_model_input
from dataproto_server.engine.sample_requests import stops
from recipes.algorithms.datum_losses import datum_loss
from rollout.engine import SamplingParams
from rollout.prompts import ChunkRenderer, token_values
from workers import Roles
from workers.model.model_config import AdamParams
from workers.roles.step_by_step import LOSS_SUM
from workers.training.forward_pass import LossFn

DEFAULT_MAX_TOKENS = 1024
CLIENT_FILE = "client.json"


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The result of a pass over data.

    ``metrics`` are sums over tokens (``loss:sum``). ``loss_fn_outputs``, if requested, has one dictionary for each datum:
    ``logprobs`` of shape ``(input tokens,)``, 0 where a target has no log-prob.
    """

    metrics: dict[str, float]
    loss_fn_outputs: list[dict[str, Tensor]]

    @property
    def loss(self) -> float:
        return self.metrics[LOSS_SUM]


@dataclass(frozen=True)
class SampledSequence:
    """One sampled response: its tokens, their log-probs under the policy, and the reason why it ended."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


class TrainingClient:
    """Samples from one policy and trains it, by calls that can be used independently.

    Inputs, data and parameters are those of the ``tinker`` package or of `dataproto.chunks`. Gradients accumulate until
    `optim_step`; samples come from the weights of the last `save_weights_for_sampler`.
    """

    def __init__(self, roles: Roles, renderer: ChunkRenderer) -> None:
        """Gives the current weights to the engine."""
        self.roles = roles
        self.renderer = renderer
        self._samplings = 0
        self.save_weights_for_sampler()

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossFn = "cross_entropy",
        loss_fn_config: Mapping[str, Any] | None = None,
        per_token: bool = False,
    ) -> ForwardBackwardOutput:
        """Computes the loss without gradients. ``per_token`` also returns the log-probs of all targets."""
        return self._pass(self.roles.actor.forward, data, loss_fn, loss_fn_config, per_token)

    def forward_backward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossFn = "cross_entropy",
        loss_fn_config: Mapping[str, Any] | None = None,
        per_token: bool = False,
    ) -> ForwardBackwardOutput:
        """Computes the loss and adds its gradients to the accumulated ones.

        Args:
            loss_fn: a name of `DATUM_LOSSES`, or a function ``(outputs, rows) -> (B, R)`` losses, metrics.
            loss_fn_config: the named loss's options.

        Raises:
            InvalidRow: a datum cannot be used; the message names its number.
            InvalidConfig, MissingColumn: see `datum_loss`.
        """
        return self._pass(self.roles.actor.forward_backward, data, loss_fn, loss_fn_config, per_token)

    def _pass(
        self,
        method: Any,
        data: Sequence[Any],
        loss_fn: str | LossFn,
        config: Mapping[str, Any] | None,
        per_token: bool,
    ) -> ForwardBackwardOutput:
        if isinstance(loss_fn, str):
            loss_fn = datum_loss(loss_fn, **(config or {}))
        passed = method(self.renderer.rows(data), loss_fn, per_token)
        outputs = [{"logprobs": values} for values in token_values(passed.log_probs, data)] if per_token else []
        return ForwardBackwardOutput(dict(passed.metrics), outputs)

    def optim_step(self, params: Any) -> dict[str, float]:
        """Makes one AdamW step with a ``tinker.AdamParams`` or `AdamParams`.

        Returns:
            ``grad_norm`` before clipping, and ``lr``.
        """
        metrics: dict[str, float] = self.roles.actor.optim_step(AdamParams.of(params))
        return metrics

    def compute_logprobs(self, prompt: Any) -> list[float | None]:
        """The log-prob of each token of a prompt given the tokens before it.

        ``None`` for the first token, for the tokens of images and for the tokens at their borders.
        """
        model_input = read_model_input(prompt)
        targets = [*self.renderer.token_ids(model_input)[1:], 0]  # the last target is not used
        rows = self.renderer.rows([Datum(model_input, {"target_tokens": targets})])
        found = self.roles.actor.compute_logprobs(rows)[0, : len(targets)].tolist()
        return [None if math.isnan(value) else value for value in found]

    def sample(self, prompt: Any, num_samples: int = 1, sampling_params: Any = None) -> list[SampledSequence]:
        """Samples responses to a prompt.

        Args:
            sampling_params: a ``tinker.SamplingParams``, any object with some of its attributes, or a `rollout.SamplingParams`.
                Texts and tokens of ``stop`` end a response in place of the model's own end tokens; with ``stop=[]`` nothing does.

        Raises:
            InvalidRow: the prompt cannot be rendered.
            InvalidConfig: impossible parameters, such as an empty stop text.
        """
        sampling = self._sampling(sampling_params, num_samples)
        self._samplings += 1
        prompts = self.renderer.prompts([prompt])
        prompts["uid"] = np.array(["prompt"], dtype=object)  # the samples depend on the seed alone
        data = self.roles.sample(prompts, sampling)
        answers = []
        for row, (length, cut) in enumerate(zip(data["response_mask"].sum(1).tolist(), data["truncated"].tolist())):
            tokens, log_probs = (data[name][row, :length].tolist() for name in ("responses", "rollout_log_probs"))
            answers.append(SampledSequence(tokens, log_probs, "length" if cut else "stop"))
        return answers if sampling.temperature else answers * num_samples

    def _sampling(self, params: Any, num_samples: int) -> SamplingParams:
        temperature = float(getattr(params, "temperature", 1.0))
        seed = getattr(params, "seed", None)
        if isinstance(params, SamplingParams):
            texts, tokens, ignore_eos = params.stop, params.stop_token_ids, params.ignore_eos
        else:
            stop = getattr(params, "stop", None)
            (texts, tokens), ignore_eos = stops(stop), stop is not None
        return SamplingParams(
            n=num_samples if temperature else 1,
            temperature=temperature,
            top_p=float(getattr(params, "top_p", 1.0)),
            top_k=max(int(getattr(params, "top_k", -1)), 0),
            max_tokens=getattr(params, "max_tokens", None) or DEFAULT_MAX_TOKENS,
            stop=texts,
            stop_token_ids=tokens,
            ignore_eos=ignore_eos,
            seed=self._samplings if seed is None else int(seed),
        )

    def save_state(self, path: str | Path) -> None:
        """Writes weights, optimizer and the number of `sample` calls to a directory."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.roles.actor.save_state(Path(path).absolute())
        (Path(path) / CLIENT_FILE).write_text(json.dumps({"samplings": self._samplings}))

    def load_state(self, path: str | Path) -> None:
        """Reads the state that `save_state` wrote.

        Samples still come from the weights of the last `save_weights_for_sampler`. Calls of `sample` without a seed continue the
        sequence of random streams.
        """
        self.roles.actor.load_state(Path(path).absolute())
        if (Path(path) / CLIENT_FILE).exists():
            self._samplings = int(json.loads((Path(path) / CLIENT_FILE).read_text())["samplings"])

    def save_weights_for_sampler(self) -> None:
        """Gives the current weights to the engine."""
        self.roles.save_weights_for_sampler()
