"""How the vLLM engine starts: without the checkpoint's weights, with few recorded batch sizes."""

import gc
import importlib
import os

import pytest
import torch
from torch._inductor import config as inductor_config

from benchmarks.engine_weights import differing_of_worker, differing_weights
from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.engines import GREEDY, ROWS, SAMPLED, generate, start
from rollout.engine import has_option
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from rollout.vllm import VLLMEngine
from rollout.vllm.low_rank import with_low_rank
from rollout.vllm.memory import model_state
from rollout.vllm.process_settings import count_whole_images, one_compile_thread
from rollout.vllm.startup import (
    MIXED_TOKENS,
    check_options,
    default_options,
    error_line,
    graph_sizes,
    speculative_options,
    with_graph_sizes,
    worker_options,
)
from workers import ActorConfig, launch
from workers.cluster.role_groups import engine_phase
from workers.roles.rollout_worker import RolloutConfig


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 256, 512, 1000, 3000])
def test_every_step_has_a_recorded_size_that_is_little_larger(most):
    """Of rows that decode, at most ``most``, and of those that read prompts next to them."""
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert most in sizes  # a whole batch that decodes is not filled up
    assert sizes[-1] == max(most, MIXED_TOKENS)
    for tokens in range(1, sizes[-1] + 1):
        runs_as = next(size for size in sizes if size >= tokens)
        assert runs_as < 2 * tokens if tokens <= 8 else runs_as <= 1.25 * tokens


def test_the_worker_is_told_of_adapters_and_of_weights_that_stay():
    """In a setting that is a part of the key of compiled code on disk."""
    assert worker_options(0, 2, {}) == worker_options(0, 1, {}) == {}
    assert worker_options(8, 1, {}) == {"additional_config": {"lora_rank": 8}}
    own = {"additional_config": {"mine": 1}}
    assert worker_options(8, 0, own) == {"additional_config": {"mine": 1, "lora_rank": 8, "weights_stay": True}}
    with pytest.raises(InvalidConfig, match=r"sleep_level=3: must be 0 \(weights stay\)"):
        VLLMEngine("", sleep_level=3)


class Product:
    """A method of vLLM's linear layers."""

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class Multiplied(torch.nn.Module):
    """A linear layer as vLLM has it, with an adapter."""

    def __init__(self, into, out):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(out, into), requires_grad=False)
        self.low_rank = torch.zeros(2, into), torch.zeros(out, 2)
        self.quant_method = with_low_rank(Product)()

    def forward(self, x):
        return self.quant_method.apply(self, x, None)


@pytest.mark.slow
def test_compiled_layers_read_an_adapter_that_is_changed_in_place():
    """They are one graph, whose inputs the matrices are."""
    layers, x = torch.nn.Sequential(Multiplied(4, 8), Multiplied(8, 4)), torch.randn(3, 4)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.inference_mode():
        before, expected = compiled(x), x
        torch.testing.assert_close(before, layers(x))
        for layer in layers:
            for matrix in layer.low_rank:
                matrix.normal_()
            expected = expected @ (layer.weight + layer.low_rank[1] @ layer.low_rank[0]).T
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(x), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, expected)


def test_sizes_that_the_user_names_and_engines_without_graphs_are_left_alone():
    options = {"max_num_seqs": 4}
    assert with_graph_sizes(options)["compilation_config"] == {"cudagraph_capture_sizes": graph_sizes(4)}
    merged = with_graph_sizes(options | {"compilation_config": {"mode": 0}})
    assert merged["compilation_config"] == {"cudagraph_capture_sizes": graph_sizes(4), "mode": 0}
    for chosen in (
        {"enforce_eager": True},
        {"compilation_config": 1},
        {"compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"compilation_config": {"max_cudagraph_capture_size": 8}},
    ):
        assert with_graph_sizes(options | chosen) == options | chosen


def test_vllm_compiles_in_one_thread_and_other_models_in_theirs():
    with inductor_config.patch(compile_threads=7):
        with one_compile_thread():
            assert inductor_config.compile_threads == 1
        with pytest.raises(RuntimeError), one_compile_thread():
            raise RuntimeError
        assert inductor_config.compile_threads == 7


@pytest.mark.parametrize("name", ["speculative_config", "worker_cls"])
def test_options_that_would_replace_the_policy_are_refused(name):
    check_options({name: None})
    with pytest.raises(InvalidConfig, match=name):
        check_options({name: "another"})


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize(("model_type", "tunes"), [("gemma4", False), ("gemma4+moe", True), ("qwen3_vl_moe", True)])
def test_a_start_tunes_the_kernels_of_experts(tmp_path, model_type, tunes):
    """Which models without experts do not have. Gemma 4 names the experts of a token otherwise than others."""
    path = write_checkpoint(model_type, tmp_path / "model")
    options = {"dtype": "auto", "kv_cache_memory_bytes": None, "tensor_parallel_size": 1}
    found = default_options(path, torch.device("cuda"), options, False, False, 0)
    assert found.get("enable_flashinfer_autotune", True) == tunes


@pytest.mark.vllm
def test_an_old_engine_that_nothing_refers_to_does_not_end_a_new_one(tmp_path):
    """It used to be freed whenever Python looked for cycles, and took the process groups of the new engine with it."""
    importlib.import_module("vllm.v1.engine.core")  # within a start its import would keep the frames of that start
    old = start("qwen2_5_vl", tmp_path / "old")
    old.vllm.itself = old.vllm
    del old
    gc.freeze()  # as vLLM does when an engine starts
    new = start("qwen2_5_vl", tmp_path / "new")
    gc.unfreeze()  # as vLLM does when another engine ends
    gc.collect()
    assert len(generate(new, new.vllm, GREEDY)) == len(ROWS)


@pytest.mark.vllm
@pytest.mark.parametrize(("head", "method"), [(True, "mtp"), (False, "ngram_gpu")])
def test_the_second_runner_has_graphs_for_steps_without_drafts(head, method):
    """Graphs are recorded for the numbers of drafts that the schedule names for any number of rows."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    config = speculative_options(3, second_runner=True, head=head, max_num_seqs=8)["speculative_config"]
    assert config["method"] == method
    assert set(build_dynamic_sd_schedule_lookup(config["num_speculative_tokens_per_batch_size"], 8, 3)[1:]) == {0, 3}
    assert "num_speculative_tokens_per_batch_size" not in speculative_options(3, False, head, 8)["speculative_config"]
    waits = [speculative_options(3, second, head, 8).get("async_scheduling", True) is False for second in (True, False)]
    assert waits == [not head, True]  # for the tokens of a step, before the next is planned
    assert speculative_options(0, True, head, 8) == {}


@pytest.mark.vllm
def test_overrides_do_not_replace_what_a_family_needs(tmp_path):
    options = {
        "dtype": "auto",
        "kv_cache_memory_bytes": None,
        "tensor_parallel_size": 1,
        "max_num_seqs": 4,
        "hf_overrides": {"a": 1},
    }
    path = write_checkpoint("kimi_k25", tmp_path / "kimi")
    with pytest.raises(InvalidConfig, match=r"hf_overrides.*kimi_k25.*config\.json"):
        default_options(path, torch.device("cuda"), dict(options), False, False, 0)
    found = default_options(path, torch.device("cuda"), options | {"hf_overrides": None}, False, False, 0)
    assert found["hf_overrides"]["architectures"] == ["KimiK25ForConditionalGeneration"]
    path = write_checkpoint("qwen2_5_vl", tmp_path / "qwen")
    assert (default_options(path, torch.device("cuda"), dict(options), False, False, 0) | options)["hf_overrides"] == {
        "a": 1
    }


class PassingOn(VLLMEngine):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)


def test_an_option_is_found_in_the_class_that_takes_the_others():
    assert has_option("vllm", "awaits_weights")
    assert has_option(f"{__name__}:PassingOn", "awaits_weights")
    assert not has_option(f"{__name__}:PassingOn", "no_option")
    assert not has_option("hf", "awaits_weights")
    with pytest.raises(InvalidConfig, match="unknown"):
        has_option("no engine", "awaits_weights")


def loaded_state(worker):
    return {name: tensor.clone() for name, tensor in model_state(worker).items()}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "glm4v_moe", "internvl", "gemma4"])
def test_an_engine_that_awaits_weights_is_as_one_that_read_them(tmp_path, model_type):
    states, samples = [], []
    for options in ({}, {"awaits_weights": True}):
        folder = tmp_path / str(len(states))
        variables = dict(os.environ)
        setup = start(model_type, folder, **options)
        changed = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
        assert not {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR"} & changed
        assert differing_weights(setup.vllm, setup.actor.named_weights()) == []
        (state,) = setup.vllm.llm.collective_rpc(loaded_state)
        states.append(state)
        images = model_type != "gemma4"  # which vLLM computes on CUDA alone
        samples.append(generate(setup, setup.vllm, SAMPLED, None if images else setup.prompts[1:2]))
        setup.vllm.llm.llm_engine.engine_core.shutdown()
    assert states[0].keys() == states[1].keys()
    for name, state in states[0].items():
        assert torch.equal(state.nan_to_num(), states[1][name].nan_to_num()), name
    assert torch.equal(samples[0]["responses"], samples[1]["responses"])
    assert torch.equal(samples[0]["rollout_log_probs"], samples[1]["rollout_log_probs"])


def run_trial_steps(worker):
    """As a start on CUDA does: vLLM's own trial of the sampler."""
    from vllm.v1.sample.sampler import Sampler

    runner, sampler = worker.model_runner, worker.policy_sampler
    own_sampler = Sampler.forward
    Sampler.forward = None  # not to be called
    try:
        with torch.inference_mode():
            hidden = torch.zeros(3, runner.model_config.hf_config.get_text_config().hidden_size)
            found = runner._dummy_sampler_run(hidden).sampled_token_ids
    finally:
        Sampler.forward = own_sampler
    return found, len(sampler.slots), type(worker.model_runner.sampler).__name__


@pytest.mark.long
@pytest.mark.vllm
def test_a_start_tries_the_policys_sampler_which_leaves_no_trace(tmp_path):
    setup = start("qwen2_5_vl", tmp_path)
    ((tokens, slots, sampler),) = setup.vllm.llm.collective_rpc(run_trial_steps)
    assert (tokens.shape, tokens.dtype, slots, sampler) == ((3, 1), torch.int32, 0, "PolicySampler")
    found, expected = generate(setup, setup.vllm, GREEDY), generate(setup, setup.hf, GREEDY)
    assert torch.equal(found["responses"], expected["responses"])
    torch.testing.assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.vllm
def test_a_model_with_experts_starts_after_a_dense_one_in_the_same_process(tmp_path, monkeypatch):
    start("qwen2_5_vl", tmp_path / "dense")
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "_EP", None)  # as if that engine had been the first
    setup = start("qwen3_vl_moe", tmp_path / "experts")
    found, expected = generate(setup, setup.vllm, GREEDY), generate(setup, setup.hf, GREEDY)
    assert torch.equal(found["responses"], expected["responses"])


@pytest.mark.long
@pytest.mark.vllm
def test_a_launched_engine_reads_no_weights_and_gets_the_actors_before_it_samples(tmp_path):
    checkpoint = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    options = {"max_num_seqs": 4, "max_model_len": 400, "kv_cache_bytes": 1 << 26}
    with launch(actor=ActorConfig(checkpoint), rollout=RolloutConfig(checkpoint, "vllm", options)) as roles:
        engine = roles.rollout.worker.engine
        assert list(roles.start_seconds) == ["loading the actor", engine_phase("vllm")]
        assert engine.llm.llm_engine.vllm_config.load_config.load_format == "awaiting"
        prompts = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300)(ROWS)
        with pytest.raises(InvalidConfig, match="load_weights first"):
            next(iter(engine.generate(build_requests(prompts, GREEDY), GREEDY)))
        data = roles.rollout.generate(prompts, GREEDY)
        assert differing_of_worker(roles.rollout.worker) == []
        data |= roles.actor.log_probs(data)
        torch.testing.assert_close(data["rollout_log_probs"], data["old_log_probs"], atol=1e-4, rtol=0)


@pytest.mark.vllm
@pytest.mark.parametrize(("found", "counted"), [((0, 0, 0), 1), ((5, 2, 2), 5)])
def test_an_image_that_is_not_split_counts_as_one_tile(found: tuple[int, int, int], counted: int) -> None:
    from vllm.model_executor.models.idefics3 import Idefics3ProcessingInfo

    class Info(Idefics3ProcessingInfo):
        def __init__(self) -> None:
            pass

        def _get_image_feature_grid_size(self, **_: object) -> tuple[int, int, int]:
            return found

    count_whole_images()
    count_whole_images()  # as for a second engine
    assert Info().get_num_patches(image_width=64, image_height=64, processor=None, mm_kwargs={}) == counted


def test_a_refused_configuration_of_vllm_says_why() -> None:
    refused = ValueError(
        "1 validation error for VllmConfig\n  Value error, not supported: prompt embeds [type=value_error]"
    )
    assert error_line(refused) == "Value error, not supported: prompt embeds"
