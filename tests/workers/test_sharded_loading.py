"""Checkpoints read by several ranks, each its own parts: the weights of ``from_pretrained``, and no larger tensor than a part."""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.processes import check_all_passed, run_ranks, shared_folder, sharing
from helpers.tiny_models import CLASSES, MODEL_TYPES, MOE_TYPES, tiny_config, tiny_model
from workers.model.lora import add_adapters, base_name
from workers.model.named_weights import full_tensor, named_buffers
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, CriticWorker
from workers.weights.hollow_model import hollow_model, local_part
from workers.weights.stored_tensors import CheckpointFiles, StoredTensor
from workers.weights.weight_sources import ConvertedWeight

CPU = torch.device("cpu")
EMBEDDING = 512 * 64  # elements of the largest weight
LORA = {"lora_rank": 2, "lora_vision": True}


def config_of(model_type: str, tied: bool = False) -> Any:
    """A tiny model whose embedding is its largest weight, with heads that two ranks can split."""
    config = tiny_config(model_type)
    text = config.get_text_config()
    text.vocab_size = EMBEDDING // text.hidden_size
    if "num_key_value_heads" in text.to_dict():
        text.num_key_value_heads = 2
    config.tie_word_embeddings = text.tie_word_embeddings = tied
    return config


@dataclass
class Largest:
    """The largest tensor in host memory in bytes, the operator that made it, and the elements read from files."""

    tensor: int = 0
    operator: str = ""
    read: int = 0
    reading: bool = False  # views of a mapped file are no memory

    def add(self, tensor: torch.Tensor, operator: str) -> None:
        size = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
        if size > self.tensor:
            self.tensor, self.operator = size, operator


class Watch(TorchDispatchMode):
    def __init__(self, seen: Largest) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and not self.seen.reading:
                self.seen.add(local_part(each)[0], str(function))
        return made


@contextmanager
def watched() -> Any:
    """Counts what is materialised and read."""
    seen, read = Largest(), CheckpointFiles.read

    def counted(files: CheckpointFiles, name: str, part: Any) -> torch.Tensor:
        seen.reading = True
        found = read(files, name, part)
        seen.reading = False
        seen.read += found.numel()
        seen.add(found, "read")
        return found

    with Watch(seen), mock.patch.object(CheckpointFiles, "read", counted):
        yield seen


def elements_read(stored: StoredTensor | None, part: int) -> int:
    """For ``part`` elements of a weight: as many, or all of the tensors that it is converted from as a whole."""
    if not part or not isinstance(stored, ConvertedWeight):
        return part
    return sum(math.prod(tensor.shape) for tensors in stored.conversion.collected.values() for tensor in tensors)


def each_rank_reads_its_parts(name: str, layout: Layout, **options: Any) -> None:
    """Weights, adapters and buffers are those of the whole model, and each rank has read its own elements, each once, except of
    weights that only whole tensors make.
    """
    ranks, path = init_ranks(layout, CPU), shared_folder() / name
    with watched() as seen:
        worker = ActorWorker(ActorConfig(str(path), **options), CPU, ranks)
    whole = getattr(transformers, CLASSES[name.removesuffix("-tied")][1]).from_pretrained(path, dtype=torch.float32)
    if options.get("lora_rank"):
        add_adapters(whole, worker.module.family, worker.config)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    mine = dict(worker.module.model.named_parameters())
    for weight, value in mine.items():
        local, part = local_part(value.detach())
        assert torch.equal(local, expected[weight][part]), weight
        assert value.requires_grad == expected[weight].requires_grad, weight
    held = ranks.all_gather(list(mine), "pp")
    unique = {weight for weight, _ in whole.named_parameters()}
    assert {weight for stage in held for weight in stage} == unique
    buffers = dict(whole.named_buffers())
    for buffer, value in worker.module.model.named_buffers():
        assert torch.equal(value, buffers[buffer]), buffer
    sources = hollow_model(str(path), worker.module.family)[2].stored
    stored = sum(
        elements_read(sources.get(str(base_name(weight))), local_part(value)[0].numel())
        for weight, value in mine.items()
        if ".lora_" not in weight
    )
    stored += sum(value.numel() for _, value in named_buffers(worker.module.model))
    assert seen.read == stored
    largest = max(local_part(value)[0].numel() for value in mine.values())
    assert seen.tensor <= 4 * largest, seen
    if ranks.size("dp", "sp") > 1:  # a stage has some weights whole, and tp keeps experts whole
        assert largest <= max(value.numel() for value in whole.parameters()) // 2


def a_critic_starts_at_zero_on_all_ranks(layout: Layout) -> None:
    """The head that no checkpoint has is on the last stage, and zero."""
    ranks = init_ranks(layout, CPU)
    worker = CriticWorker(CriticConfig(str(shared_folder() / "qwen2_5_vl")), CPU, ranks)
    heads = [full_tensor(value) for name, value in worker.module.named_parameters() if "value_head" in name]
    assert len(heads) == (ranks.rank("pp") == ranks.size("pp") - 1)
    assert not any(head.any() for head in heads)


LACKED = "model.layers.0.mlp.up_proj.weight"


def weights_that_are_absent_are_equal(layout: Layout) -> None:
    """Ranks whose generators are in other states initialise a weight that the checkpoint lacks alike."""
    torch.manual_seed(torch.distributed.get_rank())
    ranks = init_ranks(layout, CPU)
    worker = ActorWorker(ActorConfig(str(shared_folder() / "lacking")), CPU, ranks)
    weight = dict(worker.named_weights())[LACKED]
    assert 0.01 < weight.std() < 0.03
    assert all(torch.equal(weight, other) for other in ranks.all_gather(weight))


def a_rank_that_cannot_read_stops_all(layout: Layout) -> str:
    """A file that one rank alone cannot read."""
    ranks, read = init_ranks(layout, CPU), CheckpointFiles.read

    def refused(*args: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise OSError("stale handle")
        return read(*args)

    with mock.patch.object(CheckpointFiles, "read", refused):
        try:
            ActorWorker(ActorConfig(str(shared_folder() / "qwen3")), CPU, ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


TWO = {"dp": Layout(dp=2), "tp": Layout(tp=2), "pp": Layout(pp=2), "sp": Layout(sp=2)}
FOUR = {
    "dp x tp": Layout(dp=2, tp=2),
    "dp x pp": Layout(dp=2, pp=2),
    "tp x pp": Layout(tp=2, pp=2),
    "dp 4, ep 2": Layout(dp=4, ep=2),
}
FEW = {"dp": "qwen2_5_vl", "tp": "qwen3_vl", "pp": "internvl", "sp": "qwen3_5"}


scenario = partial(partial, each_rank_reads_its_parts)
SCENARIOS = {
    **{f"{axis}, {name}": scenario(name, TWO[axis]) for axis, name in FEW.items()},
    "ep": scenario("qwen3_5_moe", Layout(dp=2, ep=2)),
    "ep, adapters": scenario("qwen3_vl_moe", Layout(dp=2, ep=2), **LORA),
    "adapters": scenario("qwen2_5_vl", TWO["dp"], **LORA),
    "offload": scenario("qwen2_5_vl", TWO["dp"], offload=True),
    **{f"{axis}, tied": scenario("qwen2_5_vl-tied", layout) for axis, layout in TWO.items()},
    "critic, pp": partial(a_critic_starts_at_zero_on_all_ranks, TWO["pp"]),
    "critic, dp": partial(a_critic_starts_at_zero_on_all_ranks, TWO["dp"]),
    "absent, dp": partial(weights_that_are_absent_are_equal, TWO["dp"]),
    "absent, tp": partial(weights_that_are_absent_are_equal, TWO["tp"]),
}
MORE = {
    **{
        f"{axis}, {name}": scenario(name, layout)
        for axis, layout in TWO.items()
        for name in (*MODEL_TYPES, "idefics3", "llama")
        if FEW[axis] != name
    },
    **{f"ep, {name}": scenario(name, Layout(dp=2, ep=2)) for name in MOE_TYPES},
}
ON_FOUR = {
    **{f"{axis}, {name}": scenario(name, layout) for axis, layout in FOUR.items() for name in MOE_TYPES},
    **{f"{axis}, qwen2_5_vl": scenario("qwen2_5_vl", layout) for axis, layout in FOUR.items() if layout.ep == 1},
    **{f"{axis}, tied": scenario("qwen2_5_vl-tied", layout) for axis, layout in FOUR.items() if layout.ep == 1},
    "ep, adapters": scenario("qwen3_5_moe", FOUR["dp 4, ep 2"], **LORA),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    for name in dict.fromkeys((*MODEL_TYPES, *MOE_TYPES, "idefics3", "llama")):
        tiny_model(name, config=config_of(name)).save_pretrained(root / name)
    tiny_model("qwen2_5_vl", config=config_of("qwen2_5_vl", tied=True)).save_pretrained(root / "qwen2_5_vl-tied")
    model = tiny_model("qwen3", config=config_of("qwen3"))
    state = {name: value for name, value in model.state_dict().items() if name != LACKED}
    model.save_pretrained(root / "lacking", state_dict=state)
    with sharing(root):
        yield root


@pytest.fixture(scope="module")
def outcomes(checkpoints, tmp_path_factory):
    stops = {"stops": partial(a_rank_that_cannot_read_stops_all, TWO["dp"])}
    return run_ranks(2, SCENARIOS | stops, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(outcomes, name):
    check_all_passed(outcomes[name])


@pytest.mark.slow
def test_a_rank_that_cannot_read_is_named_on_all(outcomes, checkpoints):
    message = f"CheckpointError: the weights of {checkpoints}/qwen3 cannot be read: stale handle"
    assert outcomes["stops"] == [f"RankFailure: rank 1: {message}", message]


@pytest.fixture(scope="module")
def more_outcomes(checkpoints, tmp_path_factory):
    return run_ranks(2, MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_with_more_models(more_outcomes, name):
    check_all_passed(more_outcomes[name])


@pytest.fixture(scope="module")
def outcomes_on_four(checkpoints, tmp_path_factory):
    return run_ranks(4, ON_FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.long
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(outcomes_on_four, name):
    check_all_passed(outcomes_on_four[name])
