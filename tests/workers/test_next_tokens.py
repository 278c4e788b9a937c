"""The head that predicts the token after the next one (MTP), trained next to the policy: loss within 1e-5 and gradients within
1e-4 of their norm of those of each row alone.
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.prediction_heads import add_head, head_outputs
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.responses import build_requests
from workers.model.named_weights import named_weights
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint and the weights of its head."""
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa").eval()
    return path, model, add_head(model, path)


def actor_of(path, **options):
    optimizer = OptimizerConfig(lr=1e-2)
    return ActorWorker(ActorConfig(str(path), token_budget=60, optimizer=optimizer, **options), CPU)


def rows_of(config):
    """Four rows of text: two prompts with two samples each."""
    data = with_responses(config, prompt_batch(config, [[], []], texts=[5, 3]).repeat(2), [4, 2, 6, 3], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(1))
    return data


def policy_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def alone(model, weights, data, temperature):
    """The sum of the loss over the response tokens of all rows, each computed by itself."""
    language, total, width = model.model.language_model, torch.zeros(()), data["response_mask"].shape[1]
    banned = list(family_of(model).banned_ids(model.config))
    for row in range(len(data)):
        kept = data["attention_mask"][row].bool()
        ids, positions = data["input_ids"][row][kept], data["position_ids"][row][:, kept]
        wanted = torch.nn.functional.pad(data["response_mask"][row], (len(kept) - width, 0))[kept]
        with torch.no_grad():
            embeddings = language.embed_tokens(ids)
            states = language(inputs_embeds=embeddings[None], position_ids=positions[:, None]).last_hidden_state[0]
        outputs = head_outputs(model, weights, embeddings[1:], states[:-1], positions[1:, :-1])
        logits = outputs[:-1] @ model.get_output_embeddings().weight.detach().T / temperature
        logits[:, banned] = -torch.inf
        losses = -logits.log_softmax(-1).gather(1, ids[2:, None]).squeeze(1)
        total = total + (losses * wanted[2:]).sum()
    return total


def test_loss_and_gradients_are_those_of_each_row_alone(checkpoint):
    path, model, weights = checkpoint
    actor, plain = actor_of(path, mtp_coef=0.5, temperature=0.8), actor_of(path, temperature=0.8)
    data = rows_of(model.config)
    found = actor.forward_backward(data, policy_loss)
    plain.forward_backward(data, policy_loss)
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    expected = alone(model, weights, data, temperature=0.8)
    expected.backward()
    assert found.metrics["actor/mtp_loss"] == pytest.approx(
        expected.item(), rel=1e-5
    )  # a sum over tokens, as the loss is
    for name, parameter in actor.module.model.mtp.named_parameters():
        wanted = 0.5 * weights[name].grad
        assert torch.linalg.vector_norm(parameter.grad - wanted) <= 1e-4 * torch.linalg.vector_norm(wanted), name
    trunk = dict(plain.module.model.named_parameters())
    for name, parameter in actor.module.model.named_parameters():
        if not name.startswith("mtp."):
            torch.testing.assert_close(parameter.grad, trunk[name].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_head_learns_is_exported_and_drafts(checkpoint, tmp_path):
    path, model, weights = checkpoint
    actor, data = actor_of(path, mtp_coef=1.0), rows_of(model.config)
    losses = [actor.update(data, policy_loss)["actor/mtp_loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    actor.save(tmp_path / "saved")
    written = load_file(Path(tmp_path / "saved" / "huggingface" / "model.safetensors"))
    learned = dict(actor.module.model.named_parameters())
    for name in weights:
        assert torch.equal(written[f"mtp.{name}"], learned[f"mtp.{name}"])
    engine = HFEngine(str(path), device=CPU, speculate=2)
    engine.load_weights(list(named_weights(actor.module.model)))
    reloaded = HFEngine(str(tmp_path / "saved" / "huggingface"), device=CPU, speculate=2)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = build_requests(prompt_batch(model.config, [[], []], texts=[5, 3]), sampling)
    found = [sorted(each.generate(requests, sampling), key=lambda done: done.request) for each in (engine, reloaded)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.drafted_tokens, ours.accepted_tokens) == (theirs.drafted_tokens, theirs.accepted_tokens)


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    write_checkpoint("qwen3_5", tmp_path / "without")
    write_checkpoint("qwen2_5_vl", tmp_path / "other")
    for name in ("without", "other"):
        with pytest.raises(InvalidConfig, match="has no head that predicts further tokens"):
            actor_of(tmp_path / name, mtp_coef=0.1)
    with pytest.raises(InvalidConfig, match="mtp_coef=-1"):
        ActorConfig("path", mtp_coef=-1)
    with pytest.raises(InvalidConfig, match="it needs lora_rank=0"):
        ActorConfig("path", mtp_coef=1, lora_rank=8)
