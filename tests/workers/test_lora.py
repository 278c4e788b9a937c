"""Adapters: only they are trained, exported weights have them merged, and training resumes from them."""

from functools import partial

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import CLASSES, EACH_TYPE, MOE_TYPES, TEXT_TYPES, tiny_config, tiny_model
from workers.model.lora import adapted_forward, add_adapters, low_rank_linear
from workers.model.model_config import ModelConfig
from workers.parallel.activation_checkpointing import costly_operators
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import ReferenceWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
MOE = "qwen3_vl_moe"


def rows(model_type):
    config = tiny_config(model_type)
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [], [(6, 6)]], texts=[4, 5, 3])
    data = with_responses(config, prompts, lengths=[5, 3, 4], width=5)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {}


@pytest.fixture(scope="module", params=EACH_TYPE)
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def adapted(model_type, tmp_path_factory):
    """An actor whose adapters have been trained; tests may go on training it."""
    path = tmp_path_factory.mktemp("adapted")
    tiny_model(model_type).save_pretrained(path)
    lora = {"lora_rank": 2, "lora_alpha": 8.0, "lora_vision": model_type not in TEXT_TYPES}
    config = ActorConfig(str(path), **lora, optimizer=OptimizerConfig(lr=3e-2))
    actor = ActorWorker(config, CPU)
    before = actor.log_probs(rows(model_type))["old_log_probs"]
    for _ in range(2):
        actor.update(rows(model_type), pg_loss)
    assert (actor.log_probs(rows(model_type))["old_log_probs"] - before).abs().max() > 0.05
    return actor


def test_named_weights_are_those_of_the_base_model_with_adapters_merged(adapted, model_type):
    data, model = rows(model_type), tiny_model(model_type)
    expected = adapted.log_probs(data)["old_log_probs"]
    weights = dict(adapted.named_weights())
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in model.state_dict().items()
    }
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    assert any("vision" in name or "visual" in name for name in changed) == (model_type not in TEXT_TYPES)
    assert any(name.endswith("layers.1.self_attn.o_proj.weight") for name in changed)
    assert not any("embed_tokens" in name or "lm_head" in name or "norm" in name for name in changed)
    experts = {name for name in weights if ".experts." in name}
    dense = "glm4v_moe" in model_type or model_type == "kimi_k25"  # the first layer
    sparse = 0 if model_type not in MOE_TYPES else 1 if dense else 2
    assert len(experts) == 2 * sparse
    assert experts <= changed
    assert not any(name.endswith("mlp.gate.weight") for name in changed)  # routers
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(padded_log_probs(model, data), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "internvl"], indirect=True)
def test_the_export_is_an_ordinary_checkpoint_and_training_resumes(adapted, model_type, tmp_path):
    import transformers

    data = rows(model_type)
    adapted.save(tmp_path / "saved")
    expected = adapted.log_probs(data)["old_log_probs"]
    merged = getattr(transformers, CLASSES[model_type][1]).from_pretrained(tmp_path / "saved" / "huggingface")
    with torch.no_grad():
        torch.testing.assert_close(padded_log_probs(merged, data), expected, atol=1e-5, rtol=0)
    other = ActorWorker(adapted.config, CPU)
    other.load(tmp_path / "saved")
    assert adapted.update(data, pg_loss)["actor/loss"] == other.update(data, pg_loss)["actor/loss"]
    assert torch.equal(adapted.log_probs(data)["old_log_probs"], other.log_probs(data)["old_log_probs"])


def test_the_frozen_policy_is_the_base_model(adapted, model_type):
    data = rows(model_type)
    reference = ReferenceWorker(adapted.config.frozen(), CPU)
    with torch.no_grad():
        expected = padded_log_probs(tiny_model(model_type), data)
    torch.testing.assert_close(reference.log_probs(data)["ref_log_prob"], expected, atol=1e-5, rtol=0)


def test_only_adapters_are_trained(tmp_path):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    actor = ActorWorker(ActorConfig(str(tmp_path), lora_rank=2), CPU)
    trained = [name for name, parameter in actor.module.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7  # two matrices for each of two layers' seven linear ones
    assert all("language_model" in name and (".lora_A." in name or ".lora_B." in name) for name in trained)


def adapted_linear():
    """A layer of peft with a scale of 1.5, in double precision, and inputs."""
    plain = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 48)}).double().requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q"]), plain)
    generator = torch.Generator().manual_seed(0)
    for part in (plain["q"].lora_A, plain["q"].lora_B):
        torch.nn.init.normal_(part["default"].weight.data, generator=generator)
    x = torch.randn(1, 10, 64, dtype=torch.double, generator=generator, requires_grad=True)
    return plain["q"].double(), x


@pytest.mark.slow
def test_the_operator_of_an_adapted_layer_has_the_outputs_and_gradients_of_pefts():
    layer, x = adapted_linear()
    outcomes = []
    for forward in (layer, partial(adapted_forward, layer)):
        out = forward(x)
        matrices = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        outcomes.append((out, *torch.autograd.grad(out.square().sum(), [x, *matrices])))
    torch.testing.assert_close(*outcomes, atol=1e-10, rtol=1e-10)
    torch.library.opcheck(low_rank_linear, (x[0], layer.base_layer.weight, None, *matrices, 1.5))
    assert torch.autograd.gradcheck(
        lambda *inputs: low_rank_linear(inputs[0], layer.base_layer.weight, None, *inputs[1:], 1.5)[0],
        (x[0], *matrices),
    )


class Kept(TorchDispatchMode):
    """Counts the numbers that selective checkpointing keeps."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in costly_operators():
            self.numbers += sum(each.numel() for each in tree_leaves(found))
        return found


def test_selective_checkpointing_keeps_one_output_of_an_adapted_layer():
    layer, x = adapted_linear()
    with Kept() as ours:
        adapted_forward(layer, x)
    with Kept() as theirs:
        layer(x)
    assert ours.numbers == 10 * (48 + 4)
    assert theirs.numbers == 10 * (2 * 48 + 4)


def test_frozen_weights_have_no_float32_copies_and_no_gradients(tmp_path):
    """In bfloat16 only the adapters are in float32, with copies for the computation."""
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    actor = ActorWorker(ActorConfig(str(tmp_path), lora_rank=2, dtype="bfloat16"), CPU)
    actor.update(rows("qwen2_5_vl"), pg_loss)
    weights = dict(actor.module.model.named_parameters())
    trained = {name for name, weight in weights.items() if weight.requires_grad}
    assert {name for name, weight in weights.items() if weight.dtype == torch.float32} == trained
    assert {id(each) for each in actor.model.precision.half_weights.copies} == {id(weights[name]) for name in trained}
    assert {id(each) for each in actor.model.optimizer.moments} == {id(weights[name]) for name in trained}
    assert all(weight.grad is None for name, weight in weights.items() if name not in trained)


def test_adapted_experts_compute_the_same_as_target_parameters_of_peft():
    """Outputs and gradients equal those of peft, whose matrices hold the same numbers in another order."""
    config = tiny_config(MOE)
    model, theirs = tiny_model(MOE), tiny_model(MOE)
    add_adapters(model, family_of(config), ModelConfig(lora_rank=3, lora_alpha=8.0))
    names = [f"model.language_model.layers.{layer}.mlp.experts" for layer in range(2)]
    weights = ["gate_up_proj", "down_proj"]
    targets = [f"{name}.{weight}" for name in names for weight in weights]
    settings = peft.LoraConfig(r=3, lora_alpha=8.0, target_modules=[], target_parameters=targets)
    theirs.requires_grad_(False)
    peft.inject_adapter_in_model(settings, theirs)
    generator = torch.Generator().manual_seed(7)
    for name in names:
        experts, wrapper = model.get_submodule(name), theirs.get_submodule(name)
        pairs = []
        while hasattr(wrapper, "base_layer"):
            weight = wrapper.parameter_name
            ours = [getattr(experts, f"lora_{letter}_{weight}") for letter in "AB"]
            for matrix in ours:
                matrix.data.normal_(generator=generator)
            pairs.append((wrapper.lora_A["default"].weight, ours[0], lambda a: a.flatten(0, 1)))
            pairs.append((wrapper.lora_B["default"].weight, ours[1], lambda b: b.permute(1, 2, 0).flatten(1)))
            wrapper = wrapper.base_layer
        with torch.no_grad():
            for matrix, ours, laid_out in pairs:
                matrix.copy_(laid_out(ours))
        states = torch.randn(11, 64, generator=generator)
        choice = torch.rand(11, 4, generator=generator).topk(2).indices
        shares = torch.rand(11, 2, generator=generator)
        outputs = [each.get_submodule(name)(states, choice, shares) for each in (model, theirs)]
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
        for output in outputs:
            output.square().sum().backward()
        for matrix, ours, laid_out in pairs:
            torch.testing.assert_close(laid_out(ours.grad), matrix.grad, atol=1e-3, rtol=1e-4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "experts" in name}
    assert len(trained) == 2 * 2 * 2


def learn(path, layout, folder=None, resume=None, **options):
    """Losses and gradient norms of three updates, then log-probs and weights."""
    ranks = Ranks() if layout is None else init_ranks(layout, CPU)
    config = ActorConfig(path, lora_alpha=8.0, optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=0.5), **options)
    actor, data = ActorWorker(config, CPU, ranks), rows(MOE)
    if resume is not None:
        actor.load(resume)
    here = share_out(data, ranks.size("dp"))[ranks.rank("dp")]
    metrics = [actor.update(here, pg_loss) for _ in range(3)]
    curve = [(step["actor/loss"], step["actor/grad_norm"]) for step in metrics]
    if folder is not None:
        actor.save(folder)
    return curve, actor.log_probs(data)["old_log_probs"], {name: w.clone() for name, w in actor.named_weights()}


TWO = {
    "dp": (Layout(dp=2), {}),
    "dp, ep": (Layout(dp=2, ep=2), {"activation_checkpointing": "full"}),
    "sp, ep": (Layout(sp=2, ep=2), {"activation_checkpointing": "selective"}),
    "pp": (Layout(pp=2), {}),
}
RANK = 3  # not divisible by the number of ranks


@pytest.mark.long
def test_adapted_experts_learn_the_same_in_every_layout(tmp_path):
    """Also if two ranks hold the same three experts and shard their matrices along another dimension."""
    config = tiny_config(MOE)
    config.text_config.num_experts = 6
    tiny_model(MOE, config=config).save_pretrained(tmp_path / "model")
    run = partial(learn, str(tmp_path / "model"), lora_rank=RANK)
    curve, scores, weights = run(None)
    cases = {name: partial(run, layout, tmp_path / name, **options) for name, (layout, options) in TWO.items()}
    for name in ("two", "four"):
        (tmp_path / name).mkdir()
    outcomes = run_ranks(2, cases, tmp_path / "two")
    outcomes |= run_ranks(4, {"shared": partial(run, Layout(dp=2, sp=2, ep=2))}, tmp_path / "four")
    for case, found in outcomes.items():
        for outcome in found:
            assert not isinstance(outcome, str), outcome
            torch.testing.assert_close(torch.tensor(outcome[0]), torch.tensor(curve), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(outcome[1], scores, atol=1e-3, rtol=0)
            assert outcome[2].keys() == weights.keys()
            for name, weight in outcome[2].items():
                torch.testing.assert_close(weight, weights[name], atol=1e-3, rtol=0, msg=f"{case}: {name}")
    resumed = run(None, resume=tmp_path / "dp, ep")  # a sharded checkpoint on one rank
    assert resumed[0][0][0] < curve[-1][0]


def test_invalid_adapter_options_are_refused():
    with pytest.raises(InvalidConfig, match="lora_rank=-1"):
        ActorConfig("", lora_rank=-1)
    for options in ({}, {"lora_rank": 2, "freeze_vision": True}):
        with pytest.raises(InvalidConfig, match="lora_vision=True adapts the vision tower"):
            ActorConfig("", lora_vision=True, **options)
    adapted = ActorConfig("", lora_rank=2, lora_vision=True).frozen()
    assert (adapted.lora_rank, adapted.lora_vision) == (0, False)
