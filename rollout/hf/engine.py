"""The Hugging Face engine: batched sampling with a KV cache, on any device.

Requests join and leave between two tokens. The prefill of a prompt and the encoding of its images run once per distinct prompt;
its samples get copies of the cache. A request that continues a finished one reads only what is new.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoTokenizer

from dataproto.errors import DataProtoError, InvalidConfig, end_after, ending
from dataproto.grouping import grouped_by
from dataproto.transfer import move
from rollout.engine import Completion, FinishReason, Request, SamplingParams, cpu_or_cuda, request_name, row_name
from rollout.hf.batch import Batch
from rollout.hf.decoder import Decoder, Read, RouteRecorder
from rollout.hf.prediction_head import load_head
from rollout.hf.requests import KeptPrefixes, OpenRequest, Prefix, check_room
from rollout.hf.speculation import DraftPlaces, KeptStates, Speculation, matching, padded_drafts
from rollout.low_rank import LowRankLayers
from rollout.pretrained import check_speculation, end_ids, family_and_config, generation_config, load_model
from rollout.sampling import completes_stop_text, likeliest, non_finite, policy_log_probs, project, sample, uniforms

MIN_RUNNING_SHARE = 0.75
"""Once less than this share of a batch runs, finished rows are removed. If more requests wait than there is room for, they start
once less than this share of ``max_num_seqs`` runs. Both copy the cache.
"""
TOKEN_BUDGET = 16_384  # tokens of prompts that are read at a time
KEPT_BYTES = 4 << 30
"""The default memory for caches of finished requests."""


class HFEngine:
    """Generates with its own Hugging Face model, separate from the one that trains. See `RolloutEngine`."""

    def __init__(
        self,
        model_path: str,
        max_num_seqs: int = 256,
        dtype: str = "auto",
        device: torch.device | None = None,
        kept_bytes: int = KEPT_BYTES,
        routed_experts: bool = False,
        token_budget: int = TOKEN_BUDGET,
        speculate: int = 0,
        lora_rank: int = 0,
    ) -> None:
        """Loads the checkpoint at ``model_path``.

        Args:
            max_num_seqs: number of sequences that are generated at a time.
            dtype: "auto" is bfloat16 on CUDA and float32 elsewhere.
            kept_bytes: memory for the caches of finished requests that may be continued.
            routed_experts: completions name the experts that tokens were sent to; for models with experts.
            token_budget: tokens of prompts, with padding, that the model reads at a time. A longer prompt is read in parts.
            speculate: tokens that are drafted for a row at a time and read in one pass; see `rollout.drafts`.
            lora_rank: of the adapter that `load_adapter` hands over next to the base weights; 0: none.

        Raises:
            InvalidConfig: ``max_num_seqs`` or ``token_budget`` is below 1, ``speculate`` is below 0, or the checkpoint's
                ``generation_config.json`` cannot be read.
        """
        if min(max_num_seqs, token_budget) < 1:
            raise InvalidConfig(f"max_num_seqs={max_num_seqs} and token_budget={token_budget}: must be at least 1")
        self.device = device or cpu_or_cuda()
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype: torch.dtype = getattr(torch, dtype)
        family, config = family_and_config(model_path)
        self.end_ids = end_ids(generation_config(model_path, config), config)
        family.check_supported(config)
        check_speculation(speculate)
        self.family, self.model = family, load_model(family, model_path, self.dtype).to(self.device)
        self._path = model_path
        self._cap = family.logit_cap(self.model.config)
        self._positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.model.eval().requires_grad_(False)
        self.max_num_seqs = max_num_seqs
        self.banned_ids = tuple(self.family.banned_ids(self.model.config))  # masked in the policy
        self.undrawn_ids: tuple[int, ...] = ()  # never drawn, although the policy gives them probability
        self.weights: dict[str, Tensor] = self.model.state_dict(keep_vars=True)  # tied under both names; buffers too
        self.prefilled_tokens = 0
        """Number of prompt tokens that were computed in the engine's life."""
        self._has_weights = True  # false after a `load_weights` that failed
        recorder = RouteRecorder(self.model, self.family) if routed_experts else None
        self.no_experts = None if recorder is None else recorder.nothing
        states = KeptStates(self.model, self.family) if speculate and self.family.recurrent_mixers else None
        head = load_head(self.family, self.model, self._path) if speculate else None
        self._decoder = Decoder(
            self.family, self.model, self.device, token_budget, recorder=recorder, states=states, head=head
        )
        self._numbers = count()
        self._waiting: dict[int, OpenRequest] = {}
        self._batches: list[Batch] = []  # several if rows cannot be added to a batch
        self._kept = KeptPrefixes(kept_bytes)
        self._done: list[Completion] = []  # not returned yet
        self._speculation = Speculation(speculate, self.banned_ids, self.device) if speculate else None
        self.adapter = LowRankLayers(self.model, family, lora_rank) if lora_rank else None

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._path)

    # Requests

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """Adds a request. See `RequestEngine.submit`; the prompt is read by a later poll."""
        check_room(request, sampling, self._positions)
        return self._add(request, sampling, keep)

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """Adds a request that continues the finished request ``number``. See `RequestEngine.fork`."""
        check_room(request, sampling, self._positions)
        return self._add(request, sampling, keep, self._kept.continued_by(request, number))

    def _add(
        self,
        request: Request,
        sampling: SamplingParams,
        keep: bool = False,
        prefix: Prefix | None = None,
        name: str | None = None,
    ) -> int:
        number = next(self._numbers)
        stop_ids = frozenset(sampling.stop_ids(self.end_ids))
        told = number, name or request_name(number, request), request, sampling, keep
        self._waiting[number] = row = OpenRequest(*told, stop_ids=stop_ids, prefix=prefix)
        if self._speculation is not None:
            self._speculation.open_row(row)
        return number

    def abort(self, number: int) -> Completion | None:
        """Ends a request. See `RequestEngine.abort`."""
        self._kept.remove(number)
        row = self._waiting.pop(number, None)
        for batch in self._batches:
            row = batch.finish(number) or row
        self._remove_finished()
        return None if row is None else self._ended(row, "abort")

    @property
    def unfinished(self) -> int:
        """Number of requests whose completion no poll has returned."""
        return len(self._waiting) + self._running + len(self._done)

    @property
    def _running(self) -> int:
        return sum(int(batch.running.sum()) for batch in self._batches)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields completions in the order in which they finish; ``max_num_seqs`` requests run at a time.

        Raises:
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
        """
        places: dict[int, int] = {}
        with ending(lambda: end_after(None, *(partial(self.abort, number) for number in places))):
            for place, request in enumerate(requests):
                number = self._add(request, sampling, name=row_name(place, request.uid, sampling))
                places[number] = place
            while places:
                done = self.poll()
                self._done = [each for each in done if each.request not in places]  # another caller polls them
                for completion in [each for each in done if each.request in places]:
                    if completion.error is not None:
                        raise completion.error
                    yield replace(completion, request=places.pop(completion.request))

    @torch.inference_mode()
    def poll(self) -> list[Completion]:
        """Reads prompts of waiting requests and samples one token of every running one. See `RequestEngine.poll`."""
        try:
            self._admit()
            for batch in self._batches:
                self._step(batch)
        except BaseException as error:
            end_after(error, self._suspend)
            raise
        self._remove_finished()
        done, self._done = self._done, []
        return done

    # Prompts

    def _admit(self) -> None:
        """Starts waiting requests if there is room for all of them, or for a good part of a batch."""
        room = self.max_num_seqs - self._running
        if room < min(len(self._waiting), (1 - MIN_RUNNING_SHARE) * self.max_num_seqs) or room < 1:
            return
        chosen = list(self._waiting.values())[:room]
        for row in chosen:
            if row.prefix is not None and row.prefix.cache is None:
                row.prefix = None
        for rows in self._decoder.groups(chosen):
            self._start(rows)

    def _start(self, rows: list[OpenRequest]) -> None:
        """Reads prompts, all of which continue a prefix or none. If one of them is refused, each is read by itself."""
        try:
            read = self._decoder.read(rows)
        except DataProtoError as error:
            if len(rows) > 1:
                for row in rows:
                    self._start([row])
            else:
                del self._waiting[rows[0].number]
                error.args = (f"{rows[0].name}: {str(error).removeprefix('row 0: ')}",)
                self._done.append(self._ended(rows[0], "error", error))
            return
        self._score_prompts(read)
        self.prefilled_tokens += read.tokens
        for row in rows:
            del self._waiting[row.number]
            if row.prefix is not None:
                row.cached_tokens, row.prefix = row.prefix.cached_tokens, None
        if self._batches and self._batches[-1].can_grow:
            self._batches[-1].join(read.batch)
        else:
            self._batches.append(read.batch)

    def _score_prompts(self, read: Read) -> None:
        """Called with the prompts that have just been read; an engine may compute their log-probs."""

    # Steps

    def _step(self, batch: Batch) -> None:
        """Samples one token of every row and, unless all rows finish with it, reads it, with drafts of further ones."""
        chosen, chosen_log_probs = self._sample(batch)
        ids, values = chosen.cpu().numpy(), chosen_log_probs.cpu().numpy()
        for place in np.flatnonzero(batch.running):
            self._take(batch, int(place), int(ids[place]), float(values[place]))
        if not batch.running.any():
            return
        if batch.running.mean() < MIN_RUNNING_SHARE:
            left = batch.running_rows()
            batch.select(left)
            chosen = chosen[left]
        drafts = [] if self._speculation is None else self._speculation.drafts(batch, self._predictions(batch, chosen))
        if any(drafts):
            self._read_drafts(batch, chosen, drafts)
        else:
            self._decoder.advance(batch, chosen)

    def _predictions(self, batch: Batch, chosen: Tensor) -> Callable[[int], Tensor] | None:
        """What the model's head predicts to follow the sampled tokens ``(W,)``, if it has one: K tokens ``(W, K)``.

        Predictions come from the numbers of the random stream that the tokens themselves will come from, so that they agree as
        often as the two distributions let them.
        """
        if self._decoder.head is None:
            return None
        first = np.array([row.drawn for row in batch.rows])

        def choose(states: Tensor, ahead: int) -> Tensor:
            logits = project(states, self.family.lm_head(self.model).weight, self._cap)
            return self._draw(batch.rows, logits, first + ahead)[0]

        return lambda most: self._decoder.predicted(batch, chosen, most, choose)

    def _take(self, batch: Batch, place: int, token: int, log_prob: float) -> None:
        """Adds a sampled token to a row, which may end with it."""
        row = batch.rows[place]
        row.token_ids.append(token)
        row.log_probs.append(log_prob)
        if self._speculation is not None:
            self._speculation.add(row.number, [token])
        if (reason := self._finish_reason(row)) is not None:
            batch.running[place] = False
            self._finish(batch, place, reason)

    def _sample(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The next tokens ``(W,)`` and their log-probs ``(W,)``."""
        logits = self._logits(batch)
        for place in np.flatnonzero(batch.running):
            self._add_likeliest(batch.rows[place], logits[place, None])
        return self._draw(batch.rows, logits, np.array([row.drawn for row in batch.rows]))

    def _draw(self, rows: Sequence[OpenRequest], logits: Tensor, drawn: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens ``(N,)`` and their log-probs ``(N,)`` for ``logits (N, V)``; one call of `sample` for rows of equal settings.

        Args:
            rows: N requests; the same request may appear more than once.
            drawn: ``(N,)``, which number of its request's random stream each place draws with.
        """
        seeds, fixed = np.array([row.request.seed for row in rows], np.uint64), (self.banned_ids, self.undrawn_ids)
        numbers = move(torch.from_numpy(uniforms(seeds, drawn)), logits.device)
        groups = grouped_by(range(len(rows)), lambda place: rows[place].sampling.policy)
        if len(groups) == 1:
            return sample(logits.clone(), rows[0].sampling, numbers, *fixed)
        tokens, values = torch.empty_like(numbers, dtype=torch.int64), torch.empty_like(numbers, dtype=logits.dtype)
        for places in groups.values():
            sampling = rows[places[0]].sampling
            tokens[places], values[places] = sample(logits[places], sampling, numbers[places], *fixed)
        return tokens, values

    def _add_likeliest(self, row: OpenRequest, logits: Tensor) -> None:
        """Adds the likeliest tokens of ``logits (1, V)``, if the row wants some."""
        if wanted := row.sampling.top_log_probs:
            log_probs = policy_log_probs(logits, row.sampling.temperature or 1.0, self.banned_ids)
            row.top_log_probs += likeliest(log_probs, wanted)

    def _read_drafts(self, batch: Batch, chosen: Tensor, drafts: list[list[int]]) -> None:
        """Reads the sampled tokens ``(W,)`` and the drafts after them, and takes drafted tokens as far as they are drawn."""
        read = self._decoder.read_ahead(batch, *padded_drafts(chosen, drafts))
        places = DraftPlaces.of(drafts)
        logits = project(read.hidden[places.rows, places.ahead], self.family.lm_head(self.model).weight, self._cap)
        rows = [batch.rows[row] for row in places.rows]
        numbers = np.array([row.drawn for row in rows]) + places.ahead
        tokens, log_probs = self._draw(rows, logits, numbers)
        matched, values = matching(places, tokens.cpu().numpy(), len(drafts)), log_probs.cpu().numpy()
        taken = np.zeros(len(drafts), dtype=np.int64)
        for number, (row, ahead, token) in enumerate(zip(*places, strict=True)):
            if ahead < matched[row] and batch.running[row]:
                batch.rows[row].drafts[1] += 1
                self._add_likeliest(batch.rows[row], logits[number, None])
                self._decoder.keep_ahead(batch, read, int(row), int(ahead))
                taken[row] += 1
                self._take(batch, int(row), int(token), float(values[number]))
        self._decoder.go_on(batch, read, taken)

    def _logits(self, batch: Batch) -> Tensor:
        """Logits ``(W, V)`` of the next tokens."""
        return project(batch.hidden, self.family.lm_head(self.model).weight, self._cap)

    def _finish_reason(self, row: OpenRequest) -> FinishReason | None:
        """Why the row ends with its last token, or ``None`` if it continues."""
        token = row.token_ids[-1]
        if not math.isfinite(row.log_probs[-1]) or token in self.banned_ids:
            return "error"
        if token in row.stop_ids:
            return "stop"
        if row.sampling.stop and completes_stop_text(self._tokenizer, row.response(), row.sampling.stop):
            return "stop"
        return "length" if len(row.token_ids) >= row.sampling.max_tokens else None

    def _finish(self, batch: Batch, place: int, reason: FinishReason) -> None:
        row, error = batch.rows[place], None
        if reason == "error":
            error = non_finite(row.token_ids, row.log_probs, self.banned_ids, row.name)
        elif row.keep:
            self._kept.add(row.number, row.prefix_with(batch.cache_of(place) if batch.can_grow else None))
        self._done.append(self._ended(row, reason, error))

    def _ended(self, row: OpenRequest, reason: FinishReason, error: DataProtoError | None = None) -> Completion:
        """The completion of a request that has left."""
        if self._speculation is not None:
            self._speculation.close(row.number)
        return row.completion(reason, error)

    def _remove_finished(self) -> None:
        self._batches = [batch for batch in self._batches if batch.running.any()]

    def _suspend(self) -> None:
        """Lets all running requests wait, with their tokens so far, and drops all caches."""
        rows = [row for batch in self._batches for row, runs in zip(batch.rows, batch.running) if runs]
        self._waiting = {row.number: row for row in rows} | self._waiting
        self._batches = []
        self._kept.drop_caches()
        for row in self._waiting.values():
            row.prefix = None

    # Weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all weights in place, one after another. Tied weights are required under one of their names only, buffers not at
        all.

        Requests that run continue from their tokens so far, which are read again. After an error the engine may hold a mix of old
        and new weights: load all of them again.

        Raises:
            InvalidConfig: a name or shape does not exist in this model, tied weights have two values, or a parameter is missing.
        """
        self._suspend()
        self._has_weights = False
        left = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, tensor in weights:
            if self._takes_for_head(name, tensor):
                continue
            target = self.weights.get(name)
            if target is None or target.shape != tensor.shape:
                known = "no such parameter" if target is None else f"its shape is {tuple(target.shape)}"
                raise InvalidConfig(f"weight {name!r} {tuple(tensor.shape)} does not fit the engine's model: {known}")
            first = left.pop(id(target), None) is not None
            if (
                not first
                and isinstance(target, Parameter)
                and not torch.allclose(target, tensor.to(target), rtol=0, atol=0, equal_nan=True)
            ):
                raise InvalidConfig(f"weight {name!r} was given twice with different values, under this or a tied name")
            target.data.copy_(tensor)
        if left:
            raise InvalidConfig(
                f"the engine's model has {len(left)} weights that were not given: {sorted(left.values())[:10]}"
            )
        self._has_weights = True

    def _takes_for_head(self, name: str, tensor: Tensor) -> bool:
        """Whether a weight is that of a head, which takes it if it drafts."""
        prefix, head = self.family.prediction_head, self._decoder.head
        if prefix is None or not name.startswith(prefix):
            return False
        if head is not None:
            head.get_parameter(name.removeprefix(prefix)).data.copy_(tensor)
        return True

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the adapter. See `RolloutEngine.load_adapter`."""
        self._suspend()
        if self.adapter is None:
            raise InvalidConfig("the engine has no room for an adapter: start it with lora_rank=N")
        self.adapter.load(tensors)

    def sleep(self) -> None:
        """Drops caches and, on CUDA, moves the model to the host."""
        self._suspend()
        if self.device.type == "cuda":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> bool:
        """Moves the model back to its device."""
        self._move(self.device)
        self.weights = self.model.state_dict(keep_vars=True)  # buffers are new objects after a move
        return self._has_weights

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        if self._decoder.head is not None:
            self._decoder.head.to(device)
