"""The vLLM engine: in this process, on a CPU or CUDA, with weights that are streamed in place from the actor.

vLLM expands image placeholders and processes images itself, so that its caches identify an image by its content. The tokens that
it gets are compared with those of the training side before anything is generated. For videos see `rollout.vllm.prompt_rendering`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import count
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor

from dataproto.errors import (
    DataProtoError,
    InvalidConfig,
    NonFiniteLogits,
    RequestFailed,
    RunAbandoned,
    end_after,
    ending,
)
from dataproto.vlm import family_of
from rollout.continuation import FinishedRequest, continued_by
from rollout.engine import Completion, FinishReason, Request, SamplingParams, cpu_or_cuda, request_name, row_name
from rollout.pretrained import end_ids, generation_config
from rollout.vllm.memory import EngineMemory
from rollout.vllm.prompt_rendering import (
    MAX_REPORTED_ROWS,
    PromptRenderer,
    RenderedAhead,
    for_each_prompt,
    limit_of_images,
)
from rollout.vllm.requests import EngineRequest, RunningRequests, failure
from rollout.vllm.running_engine import cached_tokens, clear_kv_cache, tokens_of
from rollout.vllm.startup import processor_options, quantization_options, start_llm, worker_options


class VLLMEngine:
    """Generates with vLLM; tokens are sampled by the policy's own function (see `rollout.vllm.sampler`)."""

    requests_type: ClassVar[type[RunningRequests]] = RunningRequests  # a subclass may change them

    def __init__(
        self,
        model_path: str,
        max_num_seqs: int = 256,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_images: int | None = None,
        image_options: Mapping[str, Any] | None = None,
        tensor_parallel: int = 1,
        memory_share: float = 0.5,
        kv_cache_bytes: int | None = None,
        sleep_level: int | None = None,
        routed_experts: bool = False,
        awaits_weights: bool = False,
        speculate: int = 0,
        quantization: str | None = None,
        lora_rank: int = 0,
        **options: Any,
    ) -> None:
        """Starts vLLM on the checkpoint at ``model_path``.

        Args:
            max_num_seqs: number of sequences that are generated at a time.
            dtype: "auto" is bfloat16 on CUDA and float32 elsewhere.
            max_model_len: limit of prompt and response tokens together, by default the number of the model's positions.
            max_images: limit of the images of a prompt, by default none.
            image_options: `PromptBuilder.image_options`, if they are not the checkpoint's.
            tensor_parallel: number of neighbouring ranks of the default process group that run one vLLM together.
            memory_share: share of the device memory for weights and KV cache.
            kv_cache_bytes: size of the KV cache, instead of ``memory_share``; 1 GiB by default on a CPU.
            sleep_level: 0 keeps the weights on the device during sleep, 1 in host memory, and 2 drops them, and they are streamed
                again. By default 2, or 1 with ``lora_rank``.
            routed_experts: completions name the experts that tokens were sent to; for models with experts.
            awaits_weights: `load_weights` is called before the first request, so the checkpoint's weights are not read.
            speculate: tokens that are drafted for a row at a time and read in one pass; see `rollout.drafts`.
            quantization: "fp8": weights of linear layers in 8 bits. The engine then samples from another policy than the actor's.
            lora_rank: of the adapter that `load_adapter` hands over next to the base weights; 0: none.
            options: any other option of ``vllm.LLM``.
        """
        if sleep_level is None:
            sleep_level = 1 if lora_rank else 2
        if sleep_level not in (0, 1, 2):
            raise InvalidConfig(
                f"sleep_level={sleep_level}: must be 0 (weights stay), 1 (weights to the host) or 2 (weights dropped)"
            )
        chosen = {
            "max_num_seqs": max_num_seqs,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "limit_mm_per_prompt": {"video": 0} | ({} if max_images is None else {"image": max_images}),
            "mm_processor_kwargs": processor_options(image_options),
            "tensor_parallel_size": tensor_parallel,
            "gpu_memory_utilization": memory_share,
            "kv_cache_memory_bytes": kv_cache_bytes,
            **quantization_options(quantization),
        }
        chosen |= options
        chosen |= worker_options(lora_rank, sleep_level, options)
        self.device = cpu_or_cuda()
        self._awaits_weights = awaits_weights and "load_format" not in options
        self.llm, self.sampler = start_llm(
            model_path, self.device, chosen, routed_experts, self._awaits_weights, speculate
        )
        self.engine = self.llm.llm_engine
        slots = self.sampler.expert_slots
        self.no_experts = None if slots is None else slots.step[:0].cpu()
        config = self.llm.model_config
        self.dtype: torch.dtype = config.dtype
        self.family = family_of(config.hf_config)
        used = self.family.used_config(config.hf_config)
        self.banned_ids = tuple(self.family.banned_ids(used))
        self.end_ids = end_ids(generation_config(model_path, used), used)
        self.memory = EngineMemory(self.llm, self.device, sleep_level)
        self.memory.has_weights = not self._awaits_weights
        longest = limit_of_images(self.llm, self.family, self.device)
        self.prompts = PromptRenderer(self.llm, self.family, max_images, chosen["mm_processor_kwargs"], longest)
        self._kv_cache_is_finite = True
        self._numbers, self._calls = count(), count()
        self._running = self.requests_type(self.engine, self.sampler, self.end_ids)
        self._waiting: dict[int, EngineRequest] = {}  # to be given to vLLM again
        self._kept: dict[int, FinishedRequest] = {}
        self._done: list[Completion] = []  # not returned yet
        self._coming: RenderedAhead[EngineRequest] | None = None  # of a run
        self._step_tokens = int(self.engine.vllm_config.scheduler_config.max_num_batched_tokens)
        self._run: Mapping[int, int] = {}  # numbers and places of the requests of the last `generate`
        self._run_error: BaseException | None = None  # why vLLM did not get all of them; `generate` raises it

    @cached_property
    def _tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    # Requests

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """Adds a request. See `RequestEngine.submit`.

        Raises:
            InvalidPrompt: the prompt is too long, has too many images or one that vLLM refuses, or vLLM expands its tokens
                differently than the training side.
        """
        number = next(self._numbers)
        row = EngineRequest(number, request_name(number, request), request, sampling, keep)
        self._add(row)
        return number

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """Adds a request that continues the finished request ``number``. See `RequestEngine.fork`.

        What is kept is in vLLM's cache of prefixes, in whole blocks, for as long as vLLM does not need the memory.
        """
        continued_by(request, number, self._kept)
        return self.submit(request, sampling, keep)

    def abort(self, number: int) -> Completion | None:
        """Ends a request. See `RequestEngine.abort`."""
        self._kept.pop(number, None)
        row = self._waiting.pop(number, None)
        names = [name for name, each in self._running.rows.items() if each.number == number]
        for name in names:
            row = self._running.interrupt(name)
        return None if row is None else row.completion("abort")

    @property
    def unfinished(self) -> int:
        """Number of requests whose completion no poll has returned."""
        coming = 0 if self._coming is None else self._coming.left
        return coming + len(self._waiting) + len(self._running.rows) + len(self._done)

    def poll(self) -> list[Completion]:
        """Runs one step of vLLM. See `RequestEngine.poll`.

        Raises:
            RequestFailed: vLLM has dropped requests.
        """
        self.prompts.last.clear()
        if self._coming is not None:
            self._add_coming(self._coming.due())
        self._add_waiting()
        for output in self.engine.step() if self._running.rows else ():
            if output.finished and output.request_id in self._running.rows:
                self._finish(output)
        for name in [name for name, row in self._running.rows.items() if row.sampling.stop]:
            self._stop_by_text(name)
        if not self._kv_cache_is_finite:
            self._suspend()  # until the cache is cleared
        if self._running.rows and not self.engine.has_unfinished_requests():
            rows = self._running.interrupt_all()
            names = ", ".join(row.name for row in rows[:MAX_REPORTED_ROWS])
            raise RequestFailed(f"vLLM has dropped {len(rows)} requests: {names}")
        done, self._done = self._done, []
        return done

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields completions as they finish. Prompts are rendered while vLLM reads and decodes earlier ones.

        Raises:
            InvalidPrompt: prompts are too long or have too many images (then nothing has been generated), have an image that vLLM
                refuses, or vLLM expands their tokens differently than the training side; names the rows.
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
            RequestFailed: vLLM ended a request by itself; names its row and the reason.
            RunAbandoned: another run began before this one was read to its end; an engine has one run at a time.
        """
        rows = [
            EngineRequest(next(self._numbers), row_name(place, request.uid, sampling), request, sampling, keep=False)
            for place, request in enumerate(requests)
        ]
        places = {row.number: place for place, row in enumerate(rows)}
        left = len(rows)
        with ending(lambda: self._end_run(places)):  # after an error, or if the caller stops reading
            self._begin(rows, sampling, places)
            while left:
                done = self.poll()
                self._done = [each for each in done if each.request not in places]  # another caller polls them
                if self._run_error is not None:
                    raise self._run_error
                for completion in [each for each in done if each.request in places]:
                    if completion.error is not None:
                        raise completion.error
                    left -= 1
                    yield replace(completion, request=places[completion.request])
                    if left and self._run is not places:
                        raise RunAbandoned(
                            f"another run began before this one was read to its end: {left} of {len(requests)} "
                            "completions are lost; read each run before the next, for instance into a list"
                        )

    def _begin(self, rows: Sequence[EngineRequest], sampling: SamplingParams, run: Mapping[int, int]) -> None:
        """Begins a run and to render its prompts, which `poll` gives to vLLM. It ends the run before, which the caller neither
        finished nor closed.
        """
        self._check_weights()
        for_each_prompt(((row.name, row.request) for row in rows), lambda each: self.prompts.check(each, sampling))
        self._end_run(self._run)
        self._run = run
        if not rows:
            return
        self._coming = RenderedAhead(self.prompts, rows, sampling, self._step_tokens)
        self.wake_kv_cache()  # while the first prompts are rendered

    def _add_coming(self, count: int | None = None) -> None:
        """Gives the next ``count`` requests of the run, or all, to vLLM, when their prompts are rendered.

        A prompt that is refused ends the run: `generate` raises the error, whoever has called this.
        """
        coming = self._coming
        if coming is None:
            return
        try:
            with self._image_caches_in_sync():
                if not self._running.rows:
                    self._clear_non_finite()
                for _ in range(coming.left if count is None else count):
                    name, row = f"{next(self._calls)}-{coming.taken}", coming.rows[coming.taken]
                    self._running.add(name, row, coming.next_prompt(), self._adapter_of(row.request))
        except BaseException as error:
            self._run_error = error
            if not isinstance(error, DataProtoError):
                raise
            return
        if not coming.left:
            self._drop_coming()

    def _drop_coming(self) -> None:
        if self._coming is not None:
            self._coming.close()
            self._coming = None

    def _end_run(self, run: Mapping[int, int]) -> None:
        """Ends all requests of a run."""
        if run is self._run:
            self._run_error = None
            if self._coming is not None:
                self._drop_coming()
                self.llm.reset_mm_cache()  # see `_image_caches_in_sync`
        self._running.drop([name for name, row in self._running.rows.items() if row.number in run])
        self._waiting = {number: row for number, row in self._waiting.items() if number not in run}

    def _add_waiting(self) -> None:
        """Gives waiting requests to vLLM."""
        for row in list(self._waiting.values()):
            del self._waiting[row.number]
            try:
                self._add(row)
            except DataProtoError as error:
                self._done.append(row.completion("error", error=error))

    def _add(self, row: EngineRequest) -> None:
        """Gives a request, or the rest of it, to vLLM."""
        self._check_weights()
        self._add_coming()
        request, sampling = row.rest
        with self._image_caches_in_sync():
            prompt = self.prompts.render(request, sampling, row.name)
            self.wake_kv_cache()
            if not self._running.rows:
                self._clear_non_finite()
            self._running.add(f"{next(self._calls)}-0", row, prompt, self._adapter_of(request))

    def _adapter_of(self, request: Request) -> Any:
        """vLLM's name of the adapter that a request is for: none."""
        return None

    @contextmanager
    def _image_caches_in_sync(self) -> Iterator[None]:
        """vLLM caches images twice: where prompts are rendered and where they are computed, and the first relies on the second.
        An error in between would leave an image in the first cache only, so both are cleared.
        """
        try:
            yield
        except BaseException as error:
            end_after(error, self._drop_coming, self.prompts.last.clear, self.llm.reset_mm_cache)
            raise

    def _finish(self, output: Any) -> None:
        """Adds the completion of a request that vLLM has ended."""
        token_ids, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
        stopped = self._stopped_at(output.request_id, token_ids)
        row = self._running.end(output.request_id, token_ids[:stopped])
        reason = reason if stopped is None else "stop"
        error = failure(row, reason, self.banned_ids)
        if isinstance(error, NonFiniteLogits):
            self._kv_cache_is_finite = False
        elif error is None and row.keep:
            self._kept[row.number] = row.finished()
        ended: FinishReason = "error" if error else "stop" if reason == "stop" else "length"
        self._done.append(row.completion(ended, output.num_cached_tokens or 0, error))

    def _stop_by_text(self, name: str) -> None:
        """Ends a running request at its first token that completes a stop text."""
        stopped = self._stopped_at(name, tokens_of(self.engine, name))
        if stopped is not None:
            cached = cached_tokens(self.engine, name)
            row = self._running.interrupt(name, stopped)
            if row.keep:
                self._kept[row.number] = row.finished()
            self._done.append(row.completion("stop", cached))

    def _stopped_at(self, name: str, token_ids: Sequence[int]) -> int | None:
        row = self._running.rows[name]
        return row.stopped_at(token_ids, self._tokenizer) if row.sampling.stop else None  # most need no tokenizer

    def _clear_non_finite(self) -> None:
        """Removes NaN and infinity from the KV cache, where they would spread to other rows."""
        if not self._kv_cache_is_finite:
            self._reset_caches()
            self.llm.collective_rpc(clear_kv_cache)
            self._kv_cache_is_finite = True

    def _suspend(self) -> None:
        """Lets all running requests wait, with their tokens so far."""
        self._waiting |= {row.number: row for row in self._running.interrupt_all()}

    # Weights and memory

    def _check_weights(self) -> None:
        if self._awaits_weights:
            raise InvalidConfig("the engine was started without weights (awaits_weights): call load_weights first")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams Hugging Face parameters into the running engine, in place, and clears all caches that depend on weights.
        Running requests continue from their tokens so far.

        Raises:
            InvalidConfig: vLLM's model has no such name or shape, or one of its own weights is missing.
        """
        self._suspend()
        with ending(self._reset_caches):
            of_head: list[tuple[str, Tensor]] = []
            self.memory.load(self._checkpoint_weights(weights, of_head), of_head)
        self._awaits_weights = False

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the adapter in place. See `RolloutEngine.load_adapter`; running requests continue from their tokens so far."""
        self._suspend()
        with ending(self._reset_caches):
            self.memory.load_adapter(tensors)

    def _checkpoint_weights(
        self, weights: Iterable[tuple[str, Tensor]], of_head: list[tuple[str, Tensor]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights by the names of vLLM's checkpoints, without those of the head, which ``of_head`` gets."""
        head = self.family.prediction_head

        def of_model() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if head is None or not name.startswith(head):
                    yield name, weight
                elif of_head is not None:
                    of_head.append((name, weight))

        config = self.family.used_config(self.llm.model_config.hf_config)
        return self.family.rollout_weights(of_model(), config)

    def _reset_caches(self) -> None:
        """Clears cached prefixes and image features, which depend on weights. Processed images, which do not, are kept."""
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Clears caches and, on CUDA, frees the KV cache and the weights. Processed images stay in host memory, up to vLLM's
        ``mm_processor_cache_gb``.
        """
        self._suspend()
        self._reset_caches()
        self.memory.sleep()

    def wake(self) -> bool:
        """Allocates the weights; `generate` allocates the KV cache. See `RolloutEngine.wake`."""
        self.memory.wake()
        return self.memory.has_weights

    def make_room(self) -> None:
        """Begins to return torch's cached memory to the device, in a thread. See `RolloutEngine.make_room`."""
        if self.memory.freed_bytes:
            device = torch.cuda.current_device()  # which is a thread's own
            Thread(target=self.memory.make_room, args=(device,), name="make room").start()

    def wake_kv_cache(self) -> None:
        """Allocates the KV cache, if sleep freed it. `generate` calls this."""
        self.memory.wake_kv_cache()
