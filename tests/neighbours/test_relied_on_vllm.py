"""What we take from vLLM's private parts; see docs/neighbours.md."""

import inspect
from collections import deque
from types import SimpleNamespace

import pytest

from helpers.neighbours import relied_on

pytestmark = pytest.mark.vllm
TRIED = "0.32.0"


def parameters(function):
    return list(inspect.signature(function).parameters)


@relied_on("vllm", TRIED, "`rollout.vllm.weights` loads new weights into layers that vLLM has packed.")
def test_layers_are_loaded_again_one_by_one():
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    assert parameters(initialize_layerwise_reload)[0] == "model"
    assert callable(finalize_layerwise_reload)


@relied_on("vllm", TRIED, "`rollout.vllm.scheduler` asks for images and blocks only where a request needs some.")
def test_the_scheduler_asks_every_request_for_images_and_blocks():
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert issubclass(AsyncScheduler, Scheduler)
    asked = parameters(Scheduler._try_schedule_encoder_inputs)
    assert asked[:4] == ["self", "request", "num_computed_tokens", "num_new_tokens"]
    given = parameters(KVCacheManager.allocate_slots)
    assert given[:3] == ["self", "request", "num_new_tokens"]
    assert "num_lookahead_tokens" in given
    assert "empty_kv_cache_blocks" in inspect.getsource(KVCacheManager)


@relied_on("vllm", TRIED, "`rollout.vllm.scheduler` begins first samples first and plans for models with states.")
def test_what_waits_is_a_queue_and_groups_of_states_are_known():
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    assert issubclass(FCFSRequestQueue, deque)
    made = inspect.getsource(Scheduler.__init__)
    assert all(
        f"self.{name} =" in made for name in ("has_mamba_layers", "needs_kv_cache_zeroing", "num_lookahead_tokens")
    )
    assert {"take_new_block_ids", "get_computed_blocks"} <= vars(KVCacheManager).keys()
    assert "self.hash_block_size =" in inspect.getsource(BlockPool.__init__)
    assert "self.num_speculative_blocks" in inspect.getsource(MambaManager.__init__)
    assert "don't schedule it in the current step" in inspect.getsource(MambaManager)


@relied_on("vllm", TRIED, "`rollout.vllm.scheduler` uses the plan of a step again in which each row decodes a token.")
def test_a_plan_names_rows_and_what_they_have_and_its_other_fields_are_empty():
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    told = {"req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids"}
    told |= {"new_block_ids", "num_computed_tokens", "num_output_tokens"}
    assert set(parameters(CachedRequestData)) == told
    assert {"scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"} <= set(
        parameters(SchedulerOutput)
    )
    assert parameters(Scheduler._update_after_schedule) == ["self", "scheduler_output"]
    assert {"get_request_counts", "pause_state"} <= vars(Scheduler).keys()


@relied_on("vllm", TRIED, "`rollout.vllm.second_runner` and the scheduler plan steps ahead of drafts by a head.")
def test_a_plan_says_how_many_tokens_are_drafted_and_the_device_how_many_were_read():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    planned = {"num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens"}
    assert planned <= set(parameters(SchedulerOutput))
    own = inspect.getsource(AsyncScheduler._update_after_schedule)
    assert all(f"scheduler_output.{name}" in own for name in planned)
    known = {"seq_lens", "has_prefill", "num_draft_tokens", "num_draft_tokens_per_req", "num_computed_tokens_np"}
    assert known | {"prefill_len_np", "num_scheduled_tokens", "idx_mapping_np"} <= set(parameters(InputBatch))
    assert {"input_batch", "dummy_run", "num_speculative_tokens"} <= set(
        parameters(TargetDependentARSpeculator.propose)
    )
    run = inspect.getsource(TargetDependentARSpeculator.propose)
    assert run.index("self._prefill(") < run.index("if num_speculative_tokens == 0")  # the head runs all the same


@relied_on(
    "vllm", TRIED, "`rollout.vllm.sampler` returns these fields, and reads the state of requests by these names."
)
def test_a_sampler_returns_ids_and_log_probs():
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    assert parameters(LogprobsTensors)[:3] == ["logprob_token_ids", "logprobs", "selected_token_ranks"]
    assert {"sampled_token_ids", "logprobs_tensors"} <= set(parameters(SamplerOutput))


@relied_on("vllm", TRIED, "`rollout.vllm.requests` takes a stop at any end token for an end, whatever its reason says.")
def test_the_reason_of_a_stop_is_none_for_the_first_end_token_only():
    from vllm import SamplingParams
    from vllm.v1.core.sched.utils import check_stop

    def reason(token):
        settings = SamplingParams()
        settings.update_from_generation_config({"eos_token_id": [7, 8]}, eos_token_id=7)
        request = SimpleNamespace(
            pooling_params=None,
            sampling_params=settings,
            num_tokens=3,
            num_output_tokens=1,
            max_tokens=9,
            output_token_ids=[token],
            eos_token_id=7,
            stop_reason=None,
        )
        assert check_stop(request, 100)
        return request.stop_reason

    assert (reason(7), reason(8)) == (None, 8)


@relied_on(
    "vllm", TRIED, "`rollout.vllm.prompt_rendering` hands over tokens, pixels and places of media by these classes."
)
def test_prompts_are_handed_over_with_their_media():
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    assert {"offset", "length"} <= set(parameters(PlaceholderRange))
    assert {"prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders"} <= set(parameters(mm_input))
    assert inspect.isclass(MultiModalKwargsItems)
