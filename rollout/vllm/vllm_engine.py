"""The vLLM engine: in this process, on a CPU or CUDA, with weights that are streamed in place from the actor.

vLLM expands image placeholders and processes images itself, so that its caches identify an image by its content. The tokens that
it gets are compared with those of the training side before anything is generated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import DataProtoError, InvalidConfig, InvalidPrompt, NonFiniteLogits, RequestFailed, RunAbandoned
from dataproto.vlm import family_of
from rollout.engine import FINISH_REASONS, Completion, Request, SamplingParams, cpu_or_cuda, row_name
from rollout.pretrained import end_ids, generation_config
from rollout.sampling import check_sampled
from rollout.vllm.memory import EngineMemory
from rollout.vllm.prompt_rendering import MAX_REPORTED_ROWS, PromptRenderer
from rollout.vllm.startup import processor_options, start_llm
from rollout.vllm.versions import clear_kv_cache, error_line
from rollout.vllm.weight_loading import differing_parameters, load_parameters


class VLLMEngine:
    """Generates with vLLM; tokens are sampled by the policy's own function (see `rollout.vllm.sampler`)."""

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
        sleep_level: int = 2,
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
            sleep_level: 1 keeps the weights in host memory during sleep, 2 drops them, and they are streamed again.
            options: any other option of ``vllm.LLM``.
        """
        if sleep_level not in (1, 2):
            raise InvalidConfig(f"sleep_level={sleep_level}: must be 1 (weights to the host) or 2 (weights dropped)")
        chosen = {
            "max_num_seqs": max_num_seqs,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "limit_mm_per_prompt": {"video": 0} | ({} if max_images is None else {"image": max_images}),
            "mm_processor_kwargs": processor_options(image_options),
            "tensor_parallel_size": tensor_parallel,
            "gpu_memory_utilization": memory_share,
            "kv_cache_memory_bytes": kv_cache_bytes,
        }
        self._start(model_path, sleep_level, max_images, chosen | options)

    def _start(self, model_path: str, sleep_level: int, max_images: int | None, options: dict[str, Any]) -> None:
        """Sets all attributes. ``options`` are those of ``vllm.LLM``."""
        self.device = cpu_or_cuda()
        self.llm, self.sampler = start_llm(model_path, self.device, options)
        self.engine = self.llm.llm_engine
        config = self.llm.model_config
        self.dtype: torch.dtype = config.dtype
        self.family = family_of(config.hf_config)
        self.banned_ids = tuple(self.family.banned_ids(config.hf_config))
        self.end_ids = end_ids(generation_config(model_path, config.hf_config))
        self.memory = EngineMemory(self.llm, self.device, sleep_level)
        self.prompts = PromptRenderer(self.llm, int(config.max_model_len), max_images, options["mm_processor_kwargs"])
        self._kv_cache_is_finite = True
        self._open: dict[str, int] = {}  # requests of the current run, and their numbers
        self._runs = count()

    # Generation

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields completions as they finish.

        Raises:
            InvalidPrompt: prompts are too long, have too many images or one that vLLM refuses, or vLLM expands their tokens
                differently than the training side; names the rows. Nothing has been generated.
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
            RequestFailed: vLLM ended a request by itself; names its row and the reason.
            RunAbandoned: another run began before this one was read to its end; an engine has one run at a time.
        """
        mine: dict[str, int] = {}
        left = len(requests)
        try:
            self._add_requests(requests, sampling, mine)
            while mine:
                for output in self.engine.step():
                    if output.finished and output.request_id in mine:
                        left -= 1
                        number = mine.pop(output.request_id)
                        yield self._completion(
                            number, output.outputs[0], row_name(number, requests[number].uid, sampling)
                        )
                        if left and self._open is not mine:
                            raise RunAbandoned(
                                f"another run began before this one was read to its end: {left} of {len(requests)} "
                                "completions are lost; read each run before the next, for instance into a list"
                            )
                if mine and not self.engine.has_unfinished_requests():
                    rows = [row_name(number, requests[number].uid, sampling) for number in mine.values()]
                    raise RequestFailed(f"vLLM has dropped {len(mine)} requests: {', '.join(rows[:MAX_REPORTED_ROWS])}")
        finally:
            self._abort(mine)  # after an error, or if the caller stops reading

    def _add_requests(self, requests: Sequence[Request], sampling: SamplingParams, mine: dict[str, int]) -> None:
        """Begins a run: gives all requests to vLLM, and adds their names and numbers to ``mine``."""
        with self._image_caches_in_sync():
            prompts = self.prompts.render(requests, sampling)
            self.wake_kv_cache()
            self._abort(self._open)  # if the caller neither finished nor closed the last run
            self._clear_non_finite()
            self._open, run = mine, next(self._runs)
            self.sampler.begin(requests, sampling, self._stop_ids(sampling))
            for number, request in enumerate(requests):
                name = f"{run}-{number}"
                try:
                    self.engine.add_request(name, prompts[id(request.input_ids)], self._params(number, sampling))
                except ValueError as error:
                    raise InvalidPrompt(f"{row_name(number, request.uid, sampling)}: {error_line(error)}") from error
                mine[name] = number

    @contextmanager
    def _image_caches_in_sync(self) -> Iterator[None]:
        """vLLM caches images twice: where prompts are rendered and where they are computed, and the first relies on the second.
        An error in between would leave an image in the first cache only, so both are cleared.
        """
        try:
            yield
        except BaseException:
            self.llm.reset_mm_cache()
            raise

    def _abort(self, requests: dict[str, int]) -> None:
        if requests:
            self.engine.abort_request(list(requests))
            requests.clear()

    def _completion(self, number: int, output: Any, row: str) -> Completion:
        if output.finish_reason not in FINISH_REASONS:
            raise RequestFailed(
                f"{row}: vLLM ended its request with {output.finish_reason!r} after {len(output.token_ids)} tokens, neither by "
                "an end token nor by length"
            )
        token_ids = list(output.token_ids)
        log_probs = self.sampler.log_probs(number, len(token_ids))
        try:
            check_sampled(token_ids, log_probs, self.banned_ids, row)
        except NonFiniteLogits:
            self._kv_cache_is_finite = False
            raise
        return Completion(number, token_ids, log_probs, output.finish_reason)

    def _clear_non_finite(self) -> None:
        """Removes NaN and infinity from the KV cache, where they would spread to other rows."""
        if not self._kv_cache_is_finite:
            self._reset_caches()
            self.llm.collective_rpc(clear_kv_cache)
            self._kv_cache_is_finite = True

    def _stop_ids(self, sampling: SamplingParams) -> list[int]:
        return sorted({*self.end_ids, *sampling.stop_token_ids})

    def _params(self, number: int, sampling: SamplingParams) -> Any:
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        from rollout.vllm.sampler import EXTRA_ARGUMENT

        return Params(
            max_tokens=sampling.max_tokens,
            stop_token_ids=self._stop_ids(sampling),
            ignore_eos=True,  # the end tokens are among the stop tokens
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={EXTRA_ARGUMENT: number},
        )

    # Weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams Hugging Face parameters into the running engine, in place, and clears all caches that depend on weights.

        Raises:
            InvalidConfig: vLLM's model has no such name or shape, or one of its own weights is missing.
        """
        self.memory.has_weights = False
        try:
            (missing,) = self.llm.collective_rpc(load_parameters, args=(self._checkpoint_weights(weights),))
        except DataProtoError:
            raise
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise InvalidConfig(f"these weights do not fit vLLM's model: {error_line(error)}") from error
        finally:
            self._reset_caches()
        if missing:
            raise InvalidConfig(f"vLLM's model has weights that were not given: {sorted(missing)[:10]}")
        self.memory.has_weights = True

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the engine's weights that differ from the given ones in any element, in the engine's dtype."""
        (differing,) = self.llm.collective_rpc(differing_parameters, args=(self._checkpoint_weights(weights),))
        return list(differing)

    def _checkpoint_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return (self.family.rollout_weight(name, weight) for name, weight in weights)

    def _reset_caches(self) -> None:
        """Clears cached prefixes and image features, which depend on weights. Processed images, which do not, are kept."""
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Clears caches and, on CUDA, frees the KV cache and the weights. Processed images stay in host memory, up to vLLM's
        ``mm_processor_cache_gb``.
        """
        self._reset_caches()
        self.memory.sleep()

    def wake(self) -> bool:
        """Allocates the weights; `generate` allocates the KV cache. See `RolloutEngine.wake`."""
        self.memory.wake()
        return self.memory.has_weights

    def wake_kv_cache(self) -> None:
        """Allocates the KV cache, if sleep freed it. `generate` calls this."""
        self.memory.wake_kv_cache()
