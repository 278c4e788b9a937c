"""The vLLM engine: in this process, on a CPU or CUDA, its weights streamed in place from the actor.

vLLM expands image placeholders and processes images itself, so that its caches know an image by its content; what it makes of a
prompt is compared with the training side's tokens before anything is generated.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dataproto.errors import (
    DataProtoError,
    InvalidConfig,
    InvalidPrompt,
    MediaMismatch,
    NonFiniteLogits,
    RequestFailed,
    RunAbandoned,
)
from dataproto.vlm import family_of
from rollout.engine import (
    FINISH_REASONS,
    Completion,
    Request,
    SamplingParams,
    cpu_or_cuda,
    end_ids,
    generation_config,
    row_name,
)
from rollout.sampling import check_sampled
from rollout.vllm import versions as vllm_versions
from rollout.vllm.weight_loading import differing_weights, load_weights

MAX_REPORTED_ROWS = 5


class VLLMEngine:
    """Generates with vLLM, under the policy's own sampling (see `rollout.vllm.sampler`)."""

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
            max_num_seqs: sequences generated at a time.
            dtype: "auto" is bfloat16 on CUDA and float32 elsewhere.
            max_model_len: tokens of prompt and response together; by default as many as the model knows positions.
            max_images: of one prompt; unlimited by default.
            image_options: `PromptBuilder.image_options`, where they are not the checkpoint's own.
            tensor_parallel: neighbouring ranks of the default process group that run one vLLM together.
            memory_share: of the device, for weights and KV cache.
            kv_cache_bytes: size of the KV cache; overrides ``memory_share``, and is 1 GiB on a CPU by default.
            sleep_level: 1 keeps the weights in host memory while others train, 2 drops them, to be streamed at the next use.
            options: any other option of ``vllm.LLM``.
        """
        if sleep_level not in (1, 2):
            raise InvalidConfig(f"sleep_level={sleep_level}: must be 1 (weights to the host) or 2 (weights dropped)")
        self.device = cpu_or_cuda()
        self.max_images = max_images
        self.sleep_level = sleep_level
        self.processor_options = _processor_options(image_options)
        chosen = {
            "max_num_seqs": max_num_seqs,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "limit_mm_per_prompt": {"video": 0} | ({} if max_images is None else {"image": max_images}),
            "mm_processor_kwargs": self.processor_options,
            "tensor_parallel_size": tensor_parallel,
            "gpu_memory_utilization": memory_share,
            "kv_cache_memory_bytes": kv_cache_bytes,
        }
        self.llm, self.sampler = _start(model_path, self.device, chosen | options)
        self.engine = self.llm.llm_engine
        config = self.llm.model_config
        self.dtype: torch.dtype = config.dtype
        self.max_model_len = int(config.max_model_len)
        self.family = family_of(config.hf_config)
        self.banned_ids = tuple(self.family.banned_ids(config.hf_config))
        self.end_ids = end_ids(generation_config(model_path, config.hf_config))
        self._awake = self._has_weights = self._has_kv_cache = self._cache_is_finite = True
        self._freed_bytes = 0  # by the last sleep
        self._open: dict[str, int] = {}  # requests of the run under way, and their numbers
        self._runs = count()

    # Generation

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields completions as they finish.

        Raises:
            InvalidPrompt: prompts that are too long, have too many images or one that vLLM refuses, or whose tokens vLLM expands
                otherwise than the training side did; names the rows, and nothing has been generated.
            NonFiniteLogits: nothing can be sampled for a request; names its row. The engine stays usable.
            RequestFailed: vLLM ended a request by itself; names its row and the reason.
            RunAbandoned: read on after another run has begun; an engine has one at a time.
        """
        mine: dict[str, int] = {}
        left = len(requests)
        try:
            with self._both_ends_agree():
                prompts = self._render(requests, sampling)
                self.wake_kv_cache()
                self._abort(self._open)  # of a caller who neither finished nor closed the last run
                self._forget_non_finite()
                self._open, run = mine, next(self._runs)
                self.sampler.begin(requests, sampling, self._stop_ids(sampling))
                for number, request in enumerate(requests):
                    name = f"{run}-{number}"
                    try:
                        self.engine.add_request(name, prompts[id(request.input_ids)], self._params(number, sampling))
                    except ValueError as error:
                        raise InvalidPrompt(
                            f"{row_name(number, request.uid, sampling)}: {_first_line(error)}"
                        ) from error
                    mine[name] = number
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
            self._abort(mine)  # after an error, or for a caller who wants no more

    @contextmanager
    def _both_ends_agree(self) -> Iterator[None]:
        """vLLM remembers an image where prompts are read and where they are computed. After an error on the way from one to the
        other both forget, since one would rely on the other.
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
            self._cache_is_finite = False
            raise
        return Completion(number, token_ids, log_probs, output.finish_reason)

    def _forget_non_finite(self) -> None:
        """Takes NaN and infinity out of the KV cache, which would spread to other rows."""
        if not self._cache_is_finite:
            self._reset_caches()
            self.llm.collective_rpc(vllm_versions.clear_kv_cache)
            self._cache_is_finite = True

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

    # Prompts

    def _render(self, requests: Sequence[Request], sampling: SamplingParams) -> dict[int, Any]:
        """vLLM's form of each distinct prompt, by the identity of its ``input_ids``."""
        prompts: dict[int, Any] = {}
        wrong: list[str] = []
        for number, request in enumerate(requests):
            if id(request.input_ids) in prompts:
                continue
            try:
                prompts[id(request.input_ids)] = self._render_one(request, sampling)
            except Exception as error:  # vLLM's and the image processor's own, of any class
                if isinstance(error, MemoryError):
                    raise
                prompts[id(request.input_ids)] = None
                wrong.append(f"{row_name(number, request.uid, sampling)}: {_first_line(error)}")
        if wrong:
            more = f" (and {len(wrong) - MAX_REPORTED_ROWS} more rows)" if len(wrong) > MAX_REPORTED_ROWS else ""
            raise InvalidPrompt("; ".join(wrong[:MAX_REPORTED_ROWS]) + more)
        return prompts

    def _render_one(self, request: Request, sampling: SamplingParams) -> Any:
        media = request.multi_modal_data
        images = list(media.get("image", ()))
        length = len(request.input_ids)
        if length + sampling.max_tokens > self.max_model_len:
            raise InvalidPrompt(
                f"{length} prompt tokens and max_tokens={sampling.max_tokens} exceed max_model_len={self.max_model_len}"
            )
        if self.max_images is not None and len(images) > self.max_images:
            raise InvalidPrompt(f"{len(images)} images exceed max_images={self.max_images}")
        if media.get("video"):
            raise InvalidPrompt("the vLLM engine takes no videos: use the hf engine")
        if request.multi_modal_inputs and not images:
            raise InvalidPrompt("it has pixels but no images: the vLLM engine needs the column multi_modal_data")
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids) or request.input_ids.tolist()}
        if images:
            prompt["multi_modal_data"] = {"image": images}
            prompt["multi_modal_uuids"] = {"image": [image_key(image) for image in images]}
            prompt["mm_processor_kwargs"] = self.processor_options
        (rendered,) = self.llm.renderer.render_cmpl([prompt])
        check_expansion(rendered["prompt_token_ids"], request.input_ids)
        return rendered

    # Weights and memory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Streams Hugging Face parameters into the running engine, in place, and forgets what was computed with the old ones.

        Raises:
            InvalidConfig: a name or shape that vLLM's model does not have, or a weight of its own that was not among them.
        """
        self._has_weights = False
        try:
            (missing,) = self.llm.collective_rpc(load_weights, args=(self._renamed(weights),))
        except DataProtoError:
            raise
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise InvalidConfig(f"these weights do not fit vLLM's model: {_first_line(error)}") from error
        finally:
            self._reset_caches()
        if missing:
            raise InvalidConfig(f"vLLM's model has weights that were not handed over: {sorted(missing)[:10]}")
        self._has_weights = True

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the engine's weights that are not those handed in, element by element in the engine's dtype."""
        (differing,) = self.llm.collective_rpc(differing_weights, args=(self._renamed(weights),))
        return list(differing)

    def _renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return (self.family.rollout_weight(name, weight) for name, weight in weights)

    def _reset_caches(self) -> None:
        """Drops prefixes and image features, which belong to the weights that made them; processed images belong to none."""
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Lets go of the KV cache and, on CUDA, the weights. Processed images stay, up to vLLM's ``mm_processor_cache_gb``.

        The worker is told by itself: ``vllm.LLM.sleep`` would drop the processed images, which no weights have gone into.
        """
        self._reset_caches()
        if self.device.type == "cuda" and self._awake:
            torch.cuda.synchronize()  # a step that was begun ahead of the last token still reads what is taken away
            before = torch.cuda.mem_get_info()[0]
            self.llm.collective_rpc("sleep", kwargs={"level": self.sleep_level})
            self._freed_bytes = torch.cuda.mem_get_info()[0] - before
            self._awake, self._has_kv_cache = False, False
            self._has_weights = self.sleep_level == 1

    def wake(self) -> bool:
        """Makes room for the weights, and for the KV cache when generation begins. See `RolloutEngine.wake`."""
        if not self._awake:
            self._make_room()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
            self._awake = True
        return self._has_weights

    def wake_kv_cache(self) -> None:
        """Makes room for the KV cache, if there is none; `generate` does it by itself."""
        if not self._has_kv_cache:
            self._make_room()
            self.llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
            self._has_kv_cache = True

    def _make_room(self) -> None:
        """Has torch give back what training left in its cache, where vLLM would not find the memory that it gave up."""
        if torch.cuda.mem_get_info()[0] < self._freed_bytes:
            torch.cuda.empty_cache()


def _start(model_path: str, device: torch.device, options: dict[str, Any]) -> tuple[Any, Any]:
    """A running ``vllm.LLM``, and the policy in the place of its sampler."""
    vllm_versions.set_environment()
    from vllm import LLM

    from rollout.vllm.sampler import install

    if options.get("speculative_config"):
        raise InvalidConfig("speculative_config: tokens are sampled by the policy itself, one at a time")
    on_cuda = device.type == "cuda"
    if options["dtype"] == "auto":
        options["dtype"] = "bfloat16" if on_cuda else "float32"
    if options["kv_cache_memory_bytes"] is None and not on_cuda:
        options["kv_cache_memory_bytes"] = 1 << 30
    usual = {
        "distributed_executor_backend": vllm_versions.executor(options["tensor_parallel_size"]),
        "enable_sleep_mode": on_cuda,
        "generation_config": "vllm",
    } | ({} if on_cuda else {"enforce_eager": True, "skip_mm_profiling": True})
    try:
        with vllm_versions.process_settings_kept():
            llm = LLM(model_path, **usual | options)
    except (ValueError, TypeError, ImportError, AssertionError) as error:
        raise InvalidConfig(f"vLLM does not start on {model_path}: {_first_line(error)}") from error
    (sampler,) = llm.collective_rpc(install)
    return llm, sampler


def image_key(image: Image.Image) -> str:
    """Tells an image's content, as it is now, to vLLM's caches.

    >>> white, same = Image.new("RGB", (2, 2), "white"), Image.new("RGB", (2, 2), "white")
    >>> key = image_key(white)
    >>> white.putpixel((0, 0), (0, 0, 0))
    >>> image_key(same) == key, image_key(white) == key
    (True, False)
    """
    pixels = image.convert("RGBA") if image.mode in ("P", "PA") else image  # a palette's numbers are no content
    digest = blake2b(f"{image.mode}{image.size}".encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return digest.hexdigest()


def check_expansion(engine_ids: Sequence[int], input_ids: Tensor) -> None:
    """Raises `MediaMismatch` where the engine reads other tokens than the model that trains.

    >>> import torch
    >>> check_expansion([1, 7, 7], torch.tensor([1, 7, 7, 7]))
    Traceback (most recent call last):
    ...
    dataproto.errors.MediaMismatch: vLLM expands the prompt to 3 tokens, the training side to 4; they differ from token 3 on
    """
    ours = input_ids.tolist()
    if list(engine_ids) != ours:
        pairs = zip(engine_ids, ours)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(engine_ids), len(ours)))
        raise MediaMismatch(
            f"vLLM expands the prompt to {len(engine_ids)} tokens, the training side to {len(ours)}; they differ from token "
            f"{first} on"
        )


def _processor_options(image_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The image processor's settings: PIL's backend, as everywhere in this project, and the builder's own."""
    return {"use_fast": False} | dict(image_options or {})


def _first_line(error: BaseException) -> str:
    """What went wrong at the bottom of it, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    if "cached item" in line:
        line += "; its images are larger than vLLM's cache of processed images: raise mm_processor_cache_gb"
    return line
