"""Products in float8, emulated on a CPU: rounded as on a GPU, multiplied in float32."""

from functools import partial

import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.quantized import check_float8, use_float8
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training import loading
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
WITH_TORCHAO = pytest.mark.torchao


@pytest.fixture
def emulated(monkeypatch):
    """The option ``float8`` on a CPU, for layers of any width."""
    monkeypatch.setattr(loading, "check_float8", lambda *_: None)
    monkeypatch.setattr(loading, "use_float8", partial(use_float8, least_width=32, emulate=True))


def test_what_float8_does_not_go_with_is_refused_by_name(monkeypatch):
    cuda, config = torch.device("cuda"), ModelConfig(compile=True, float8=True)
    with pytest.raises(InvalidConfig, match="float8=True needs a CUDA device"):
        check_float8(config, CPU, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidConfig, match=r"compute capability 9\.0"):
        check_float8(config, cuda, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(config, cuda, 1)
    refused = {
        "compile=True": (ModelConfig(float8=True), 1),
        "lora_rank=0": (ModelConfig(compile=True, float8=True, lora_rank=4), 1),
        "tp=2": (config, 2),
    }
    for word, (options, tensor_parallel) in refused.items():
        with pytest.raises(InvalidConfig, match=word):
            check_float8(options, cuda, tensor_parallel)


def test_an_actor_on_a_cpu_refuses_it(tmp_path):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="not cpu"):
        ActorWorker(ActorConfig(str(tmp_path), compile=True, float8=True), CPU)


@WITH_TORCHAO
def test_the_decoders_large_layers_are_chosen():
    model = tiny_model("qwen3_vl_moe")
    with pytest.raises(InvalidConfig, match="1024 wide"):
        use_float8(model, family_of(model.config))
    names = use_float8(model, family_of(model.config), least_width=64, emulate=True)
    assert names == [
        f"model.language_model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in ("q", "o")
    ]
    assert {type(model.get_submodule(name)).__name__ for name in names} == {"Float8Linear"}


@WITH_TORCHAO
def test_a_layer_rounds_its_inputs_and_weights_by_row():
    """Beside a rounding of our own: by row of the inputs and of the weight, scales are powers of two, numbers e4m3."""
    layer = torch.nn.Linear(64, 32, bias=False)
    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(layer)

    class Family:
        decoder_layers = "layers"

        def routers(self, model):
            return []

    states = torch.randn(7, 64)
    exact = layer(states)
    use_float8(model, Family(), least_width=32, emulate=True)

    def rounded(rows):
        scale = torch.exp2(torch.floor(torch.log2(448 / rows.abs().amax(1, keepdim=True))))
        return (rows * scale).to(torch.float8_e4m3fn).float() / scale

    expected = rounded(states) @ rounded(layer.weight).T
    torch.testing.assert_close(model.layers(states), expected, atol=1e-5, rtol=1e-5)
    error = float(((expected - exact).norm() / exact.norm()).detach())
    assert 0.005 < error < 0.06


def rows():
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [], [(6, 6)]], texts=[4, 5, 3])
    return with_responses(config, prompts, lengths=[5, 3, 4], width=5)


@pytest.mark.slow
@WITH_TORCHAO
def test_an_actor_learns_and_hands_its_weights_over_as_ever(tmp_path, emulated):
    """Log-probs and gradients are near those without float8; names and types of weights are the same."""
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    actors = {
        float8: ActorWorker(ActorConfig(str(tmp_path), float8=float8, optimizer=OptimizerConfig(lr=1e-3)), CPU)
        for float8 in (False, True)
    }
    scores = {float8: actor.log_probs(rows())["old_log_probs"] for float8, actor in actors.items()}
    assert 1e-5 < float((scores[True] - scores[False]).abs().max()) < 0.2
    for actor in actors.values():
        actor.forward_backward(rows(), lambda outputs, data: (-outputs.log_probs, {}))
    pairs = zip(actors[False].module.parameters(), actors[True].module.parameters(), strict=True)
    for exact, found in pairs:
        if exact.grad is not None:
            assert float((found.grad - exact.grad).norm()) < 0.25 * float(exact.grad.norm()) + 1e-3
    for actor in actors.values():
        actor.optim_step()
    shapes = [{name: (w.shape, w.dtype) for name, w in actor.named_weights()} for actor in actors.values()]
    assert shapes[0] == shapes[1]
    actors[True].save(tmp_path / "saved")
    again = ActorWorker(actors[True].config, CPU)
    again.load(tmp_path / "saved")
    expected = actors[True].log_probs(rows())["old_log_probs"]
    assert torch.equal(again.log_probs(rows())["old_log_probs"], expected)
