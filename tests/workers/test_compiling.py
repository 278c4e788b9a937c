"""Compiled layers give the same numbers, and are compiled once for all lengths."""

import copy
import os

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.routes import with_routes
from helpers.tiny_models import MOE_TYPES, rounding, tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import compiling, parallelize
from workers.ranks.mesh import Ranks
from workers.training.loading import freeze

CPU = torch.device("cpu")


def batch(model, grids, lengths):
    prompts = prompt_batch(model.config, grids, texts=[4 + 3 * number for number in range(len(grids))])
    return with_responses(model.config, prompts, lengths=lengths, width=max(lengths))


def run(module, data):
    module.zero_grad()
    log_probs = forward_rows(module, data, CPU).scores
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
    (log_probs * weights).sum().backward()
    gradients = {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}
    return log_probs.detach(), gradients


def check_compiled(model_type, mode, recorded=False):
    model = tiny_model(model_type)
    plain, compiled = (PackedVLM(copy.deepcopy(model), family_of(model.config), temperature=0.8) for _ in range(2))
    plain.replays_routing = compiled.replays_routing = recorded
    options = ModelConfig(activation_checkpointing=mode, compile=True)
    parallelize(compiled, Ranks(), options)
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    batches = (  # longest segments differ: under checkpoints torch 2.11 compiles for one, and at the second for any
        ([[(4, 6), (8, 4)], [], [(6, 6)]], [5, 1, 6]),
        ([[(8, 8)], [(4, 4)], []], [3, 10, 4]),
        ([[(4, 10)], [], [], [(6, 4)]], [2, 7, 3, 1]),
    )
    for grids, lengths in batches:
        data = batch(model, grids, lengths)
        data = with_routes(model.config, data) if recorded else data
        (ours, gradients), (expected, theirs) = run(compiled, data), run(plain, data)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        assert gradients.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + rounding(name), name
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[2] == graphs[1]  # other lengths compile nothing
    assert not counters["graph_break"]
    assert [name for name, _ in compiled.model.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.long
def test_compiled_and_checkpointed_layers_give_the_same_numbers():
    check_compiled("qwen2_5_vl", "selective")
    assert not counters["aot_autograd"]["autograd_cache_bypass"]  # the next run finds the layers traced and split


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_mode_can_be_compiled(model_type, mode):
    check_compiled(model_type, mode)


@pytest.fixture
def backend():
    return "aot_eager"


@pytest.fixture
def traced(monkeypatch, backend):
    """Graphs run as they are: to translate them to C++ takes minutes for each family."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options=None, **kw: compile_(forward, backend=backend, **kw))


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*(each for each in MOE_TYPES if each != "qwen3_vl_moe"), "gemma4+per_layer"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_further_families_are_traced_without_graph_breaks(traced, model_type, mode):
    check_compiled(model_type, mode)


@pytest.mark.parametrize(
    ("mode", "backend"), [("selective", "eager"), pytest.param("full", "aot_eager", marks=pytest.mark.long)]
)
@pytest.mark.slow
def test_layers_that_tell_their_routers_of_padding_are_traced_with_checkpoints(traced, mode):
    """The backward pass of one is traced too: it computes all of a layer again, its router included."""
    check_compiled("qwen3_vl_moe", mode)
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint  # without it torch 2.11 and 2.12 give up


@pytest.mark.slow
def test_code_is_compiled_for_all_lengths_of_segments_at_once(traced):
    def forward(x, max_length_q):
        return x * max_length_q

    torch._dynamo.reset()
    counters.clear()
    compiled = compiling.Compiled(forward)
    found = [
        compiled(torch.ones(rows, 2), max_length_q=length).sum().item() for rows, length in ((2, 3), (4, 5), (3, 3))
    ]
    assert found == [12, 40, 18]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="at 4,096 rows torch chooses another kernel on a CUDA device")
def test_norms_of_few_and_of_many_rows_share_their_code():
    weight = torch.ones(1280, device="cuda", requires_grad=True)

    def norm(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    torch._dynamo.reset()
    counters.clear()
    compiled = compiling.Compiled(norm)
    for rows in (4000, 4200, 100, 9000):
        x = torch.randn(rows, 1280, device="cuda", requires_grad=True)
        compiled(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def broken(x):
    torch._dynamo.graph_break(msg="for a reason")
    return x + 1


def broken_in_a_loop(x):
    for _ in range(2):
        torch._dynamo.graph_break(msg="torch says nothing of it")
    return x + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "reason"),
    [(broken, "user-inserted graph break"), (broken_in_a_loop, "TORCH_LOGS=graph_breaks prints it")],
)
def test_a_part_that_is_not_compiled_is_told_once_with_its_reason(traced, caplog, monkeypatch, forward, reason):
    monkeypatch.setattr(compiling, "_told", set())
    torch._dynamo.reset()
    counters.clear()
    torch.compile(broken)(torch.zeros(3))  # of other code of the process nothing is told
    compiling.Compiled(lambda x: x + 2)(torch.zeros(3))
    for _ in range(2):
        assert compiling.Compiled(forward)(torch.zeros(4)).tolist() == [1] * 4
        torch._dynamo.reset()
    (said,) = (record.getMessage() for record in caplog.records if record.name == compiling.__name__)
    assert said.startswith("torch.compile left a part of a layer uncompiled, which is slower: ")
    assert reason in said.lower() or reason in said
    counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager"])
@pytest.mark.parametrize(
    ("model_type", "rank"),
    [
        ("qwen2_5_vl", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("qwen3_5", 0), ("qwen3_vl_moe", 0), ("qwen3_vl_moe", 2))
        ),
    ],
)
def test_layers_share_their_compiled_code(traced, model_type, rank):
    graphs = []
    for layers in (2, 4):
        config = tiny_config(model_type)
        text = config.get_text_config()
        text.num_hidden_layers = layers + 1
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = [kinds[0]] * layers + [kinds[-1]]
        settings = ModelConfig(activation_checkpointing="selective", compile=True, lora_rank=rank)
        model, family = type(tiny_model(model_type))(config), family_of(config)
        freeze(model, family, settings, trains=True)
        module = PackedVLM(model, family, temperature=1.0)
        parallelize(module, Ranks(), settings)
        torch._dynamo.reset()
        counters.clear()
        run(module, batch(model, [[(4, 6)], [(6, 6)]], [5, 6]))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.long
def test_layers_with_recorded_experts_are_compiled_once():
    check_compiled("qwen3_vl_moe", "none", recorded=True)


def test_without_a_compiler_it_says_so(monkeypatch):
    model = tiny_model("qwen2_5_vl")
    module = PackedVLM(model, family_of(model.config), temperature=1.0)
    monkeypatch.setattr(compiling, "which", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"C\+\+ compiler"):
        compiling.CompiledLayers(Ranks(), ModelConfig(compile=True)).apply(module)


NAME = "TORCHINDUCTOR_CACHE_DIR"


def test_compiled_code_is_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(NAME, default_cache_dir())  # as torch sets it
    compiling.keep_compiled_code()
    assert os.environ[NAME] == str(tmp_path / "dataproto" / "inductor")
    monkeypatch.setenv(NAME, "/elsewhere")
    compiling.keep_compiled_code()
    assert os.environ[NAME] == "/elsewhere"


@pytest.mark.long
def test_a_later_start_reads_what_was_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(NAME, default_cache_dir())
    compiling.keep_compiled_code()
    for _ in range(2):  # of the second start everything is on disk
        torch._dynamo.reset()
        counters.clear()
        compiling.Compiled(lambda x: x.sin() * 2)(torch.randn(5, 8))
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert any((tmp_path / "dataproto" / "inductor").rglob("*.so"))
