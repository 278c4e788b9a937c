"""What we take from torch and torchao; see docs/neighbours.md."""

import inspect
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from helpers.neighbours import relied_on
from workers.model.patches import prepare_compilation


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


@relied_on(
    "torch",
    "2.13.0",
    "`workers.training` loads into the tensors of a model, never with assign, so that tied weights stay so.",
)
def test_loading_by_assignment_unties():
    model = Tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.head.weight is model.embedding.weight
    model.load_state_dict(state, assign=True)
    assert model.head.weight is not model.embedding.weight


@relied_on("torch", "2.13.0", "`workers.parallel.fsdp` wraps a tied embedding together with the root, never by itself.")
@pytest.mark.parametrize("alone", [False, True])
def test_a_tied_embedding_that_is_sharded_alone_is_untied(tmp_path, alone):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = Tied()
        if alone:
            fully_shard(model.embedding, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert (model.head.weight is model.embedding.weight) is not alone
    finally:
        torch.distributed.destroy_process_group()


@relied_on("torch", "2.13.0", "Exports go into new folders, where no file of an earlier save is left.")
def test_the_reader_of_hugging_face_files_reads_leftovers_too(tmp_path):
    save_file({"new": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
    save_file({"old": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"new": "model-00001-of-00001.safetensors"}}'
    )
    found = checkpoint.HuggingFaceStorageReader(str(tmp_path)).read_metadata()
    assert set(found.state_dict_metadata) == {"new", "old"}


@relied_on("torch", "2.13.0", "`workers.model.patches` drops gradients that FSDP has not reduced by these names.")
def test_fsdp_keeps_gradients_that_are_not_reduced_under_these_names():
    names = {"unsharded_accumulated_grad", "_unsharded_param"}
    found = set(FSDPParam.__annotations__) | set(re.findall(r"\w+", inspect.getsource(FSDPParam)))
    assert names <= found  # from torch 2.15 on the first is a property that reads the second
    assert "_partial_reduce_output" in inspect.getsource(FSDPParamGroup)


@relied_on(
    "torch",
    "2.13.0",
    "`workers.model.patches.prepare_compilation` sets them, else layers compile too often or not at all.",
)
def test_the_compiler_has_these_settings():
    known = torch.compiler.config.dynamic_sources
    limit = torch._dynamo.config.recompile_limit
    try:
        prepare_compilation(limit + 1, "a_canary")
        assert torch._dynamo.config.recompile_limit == limit + 1
        assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
        assert "a_canary" in torch.compiler.config.dynamic_sources
    finally:
        torch._dynamo.config.recompile_limit, torch.compiler.config.dynamic_sources = limit, known


@relied_on("torch", "2.13.0", "`workers.model.attention` calls it on CUDA with packed rows, a scale and a window.")
def test_attention_of_variable_lengths_takes_a_scale_and_a_window():
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(names)


@pytest.mark.torchao
@relied_on(
    "torchao", "0.18.0", "`workers.training.eight_bit` and `workers.model.quantized` override and call these functions."
)
def test_torchao_has_weights_of_four_bits_and_moments_of_eight():
    from torchao.optim import AdamW8bit
    from torchao.quantization import to_nf4

    assert list(inspect.signature(AdamW8bit._new_buffer).parameters) == ["self", "p", "signed"]
    weight = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    assert float((to_nf4(weight, 64, 64).to(torch.float32) - weight).abs().max()) < 0.2
