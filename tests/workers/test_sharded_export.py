"""Exports that ranks write together: read by ``from_pretrained`` alone, complete or absent, and no rank keeps the whole model."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from dataproto.errors import CheckpointError
from helpers.layouts import config_with_heads
from helpers.processes import run_ranks, shared_folder, sharing
from helpers.tiny_models import CLASSES, GEMMA4_TYPES, MODEL_TYPES, tiny_config, tiny_model
from workers.model.named_weights import all_named_weights, named_buffers
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.weights import sharded_export
from workers.weights.sharded_export import ShardedExport, StageWeights, plan_export

CPU = torch.device("cpu")
SMALL = 40_000  # bytes of a file
WITH_BUFFERS = (*MODEL_TYPES, "glm4v_moe")


def test_a_plan_cuts_between_layers_and_writes_a_tied_weight_once():
    first = StageWeights({"model.embed.weight": 10, "model.layers.0.a": 3, "model.layers.0.b": 3}, [0, 1])
    last = StageWeights({"model.layers.1.a": 6, "model.embed.weight": 10, "mtp.a": 1}, [2, 3])
    files = plan_export([first, last], ["model.layers"], 12)
    assert [(sorted(file.weights), file.writer) for file in files] == [
        (["model.embed.weight"], 0),
        (["model.layers.0.a", "model.layers.0.b"], 1),
        (["model.layers.1.a"], 2),
        (["mtp.a"], 3),
    ]
    assert [file.file for file in files][::3] == [
        "model-00001-of-00004.safetensors",
        "model-00004-of-00004.safetensors",
    ]


def test_a_plan_of_small_files_uses_each_rank_in_turn():
    stage = StageWeights({f"layers.{layer}.a": 5 for layer in range(6)}, [0, 1])
    assert [file.writer for file in plan_export([stage], ["layers"], 10)] == [0, 1, 0]
    assert [file.file for file in plan_export([StageWeights(stage.sizes, [0])], ["layers"], 100)] == [
        "model.safetensors"
    ]


def loaded(model_type: str, path: Path) -> Any:
    model, found = getattr(transformers, CLASSES[model_type][1]).from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(names for kind, names in found.items() if kind.endswith("_keys")), found
    return model


def an_export_loads(name: str, layout: Layout, in_background: bool = False, **options: Any) -> dict[str, Any]:
    """The weights of a changed model come back; each rank has kept and written its files alone."""
    ranks, kept = init_ranks(layout, CPU), []
    worker = ActorWorker(ActorConfig(str(shared_folder() / name), **options), CPU, ranks)
    with torch.no_grad():
        for number, parameter in enumerate(worker.module.parameters()):
            parameter.add_(0.1 + 0.01 * (number % 5))
    target = shared_folder() / f"{name} {layout} {in_background} {sorted(options)}"
    expected = {
        each: weight.clone() for each, weight in all_named_weights(worker.module.model, ranks, None, None, merged=True)
    }
    write = ShardedExport._write

    def counted(export: ShardedExport, file: Any, tensors: dict[str, torch.Tensor]) -> None:
        kept.append((file.file, sum(tensor.nbytes for tensor in tensors.values())))
        write(export, file, tensors)

    with mock.patch.object(ShardedExport, "_write", counted), mock.patch.object(sharded_export, "FILE_BYTES", SMALL):
        worker.save(target, in_background)
        with torch.no_grad():  # training goes on
            for parameter in worker.module.parameters():
                parameter.zero_() if in_background else None
        worker.finish_save()
    model = loaded(name.removesuffix("-tied"), target / "huggingface")
    state = dict(model.named_parameters()) | dict(named_buffers(model))
    assert state.keys() == expected.keys()
    for each, weight in expected.items():
        wanted = weight.to(worker.model.precision.dtype) if not worker.module.family.in_float32(each) else weight
        assert torch.equal(state[each].float(), wanted.float()), each
    dtype = json.loads((target / "huggingface" / "config.json").read_text())["dtype"]
    assert dtype == str(worker.model.precision.dtype).removeprefix("torch.")
    assert not list((target / "huggingface").glob(".*"))
    size = worker.model.precision.dtype.itemsize
    return {"files": kept, "model": size * sum(weight.numel() for weight in expected.values())}


def a_full_disk_is_told_on_all(layout: Layout, in_background: bool) -> str:
    """One rank cannot write; the index, which makes an export complete, is absent."""
    ranks = init_ranks(layout, CPU)
    worker, target = (
        ActorWorker(ActorConfig(str(shared_folder() / "qwen3")), CPU, ranks),
        shared_folder() / f"full {in_background}",
    )
    save = sharded_export.save_file

    def full(*args: Any) -> None:
        if torch.distributed.get_rank() == 1:
            raise OSError("no space left")
        save(*args)

    with mock.patch.object(sharded_export, "save_file", full):
        try:
            worker.save(target, in_background)
            worker.finish_save()
        except CheckpointError as error:
            assert not (target / "huggingface" / "model.safetensors.index.json").exists()
            return str(error).removeprefix(str(target))
    return "written"


def ranks_that_see_other_files_have_one_plan(layout: Layout) -> list[str]:
    """The last rank finds weights in the checkpoint that the model does not use, the first one does not."""
    ranks = init_ranks(layout, CPU)
    worker, stage = ActorWorker(ActorConfig(str(shared_folder() / "qwen3")), CPU, ranks), ShardedExport._stage

    def differing(export: ShardedExport) -> StageWeights:
        found = stage(export)
        return StageWeights(found.sizes | ({"mtp.weight": 10**9} if export.rank else {}), found.ranks)

    with mock.patch.object(ShardedExport, "_stage", differing):
        export = ShardedExport(shared_folder() / "plan", worker.module.model, worker.module.family, ranks, None)
    return [file.file for file in export.mine]


def an_export_replaces_one_of_more_files(layout: Layout) -> None:
    """Files of the export before are gone."""
    ranks = init_ranks(layout, CPU)
    worker, target = ActorWorker(ActorConfig(str(shared_folder() / "qwen3")), CPU, ranks), shared_folder() / "again"
    with mock.patch.object(sharded_export, "FILE_BYTES", SMALL):
        worker.save(target)
    before = {file.name for file in (target / "huggingface").glob("*.safetensors")}
    ranks.all_gather(None, "dp")
    worker.save(target)
    after = {file.name for file in (target / "huggingface").glob("*.safetensors")}
    assert len(after) == 2
    assert not after & before
    loaded("qwen3", target / "huggingface")


LORA = {"lora_rank": 2, "lora_vision": True}
DP, TP, PP = Layout(dp=2), Layout(tp=2), Layout(pp=2)
SCENARIOS = {
    "dp": partial(an_export_loads, "qwen2_5_vl", DP),
    "dp, half, in_background": partial(an_export_loads, "qwen3_5_moe", DP, in_background=True, dtype="bfloat16"),
    "tp": partial(an_export_loads, "qwen3_vl", TP),
    "pp, tied, in_background": partial(an_export_loads, "qwen2_5_vl-tied", PP, in_background=True),
    "ep": partial(an_export_loads, "qwen3_vl_moe", Layout(dp=2, ep=2)),
    "adapters": partial(an_export_loads, "internvl", DP, **LORA),
}
MORE = {
    f"{axis}, {name}": partial(an_export_loads, name, layout, in_background)
    for axis, layout, in_background in (("dp", DP, True), ("tp", TP, False), ("pp", PP, False))
    for name in WITH_BUFFERS
}
FULL = {in_background: partial(a_full_disk_is_told_on_all, DP, in_background) for in_background in (False, True)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    for name in WITH_BUFFERS:
        config = tiny_config(name)
        if name in GEMMA4_TYPES:  # whose layers have heads of their own
            config = config_with_heads(name, heads=2, key_value_heads=2)
        elif "num_key_value_heads" in config.get_text_config().to_dict():
            config.get_text_config().num_key_value_heads = 2
        tiny_model(name, config=config).save_pretrained(root / name)
    tied = tiny_config("qwen2_5_vl")
    tied.tie_word_embeddings = tied.text_config.tie_word_embeddings = True
    tiny_model("qwen2_5_vl", config=tied).save_pretrained(root / "qwen2_5_vl-tied")
    with sharing(root):
        yield root


@pytest.fixture(scope="module")
def outcomes(checkpoints, tmp_path_factory):
    others = {"again": partial(an_export_replaces_one_of_more_files, DP)}
    others["plan"] = partial(ranks_that_see_other_files_have_one_plan, DP)
    full = {f"full {in_background}": each for in_background, each in FULL.items()}
    return run_ranks(2, SCENARIOS | others | full, tmp_path_factory.mktemp("two"))


def check(outcomes: list[Any]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, dict), f"rank {rank}: {outcome}"
    files = [{file for file, _ in outcome["files"]} for outcome in outcomes]
    assert files[0]
    assert files[1]
    assert not files[0] & files[1]
    for outcome in outcomes:
        largest = max(size for _, size in outcome["files"])
        assert largest < 0.7 * outcome["model"]  # one layer of two may be more than half


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(outcomes, name):
    check(outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("in_background", FULL)
def test_a_rank_that_cannot_write_is_named_on_all(outcomes, in_background):
    told = "/huggingface could not be written: rank 1: OSError: no space left; make room"
    assert [message.startswith(told) for message in outcomes[f"full {in_background}"]] == [True, True]


@pytest.mark.slow
def test_an_earlier_export_is_replaced(outcomes):
    assert outcomes["again"] == [None, None]


@pytest.mark.slow
def test_ranks_write_the_files_of_one_plan(outcomes):
    assert outcomes["plan"] == [["model-00001-of-00002.safetensors"], ["model-00002-of-00002.safetensors"]]


def test_a_file_that_lacks_a_weight_is_an_error(checkpoints, tmp_path):
    worker = ActorWorker(ActorConfig(str(checkpoints / "qwen3")), CPU)
    gathered = list(sharded_export.named_weights(worker.module.model, None, worker.module.family.in_float32))
    lost = gathered.pop()[0]
    with (
        mock.patch.object(sharded_export, "named_weights", return_value=gathered),
        pytest.raises(CheckpointError, match=f"rank 0: model.safetensors lacks 1 weights: {lost}"),
    ):
        worker.save(tmp_path / "lost")


def test_any_error_as_an_export_is_completed_is_told_on_all(checkpoints, tmp_path):
    """The other ranks wait for the first one."""
    worker = ActorWorker(ActorConfig(str(checkpoints / "qwen3")), CPU)
    with (
        mock.patch.object(ShardedExport, "_complete", side_effect=ValueError("no such option")),
        pytest.raises(CheckpointError, match="rank 0: ValueError: no such option"),
    ):
        worker.save(tmp_path / "failed")


@pytest.fixture(scope="module")
def more_outcomes(checkpoints, tmp_path_factory):
    return run_ranks(2, MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_with_more_models(more_outcomes, name):
    check(more_outcomes[name])
