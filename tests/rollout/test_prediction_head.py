"""Drafts from a model's own head (MTP): those of an independent computation without a cache.

`test_speculation` shows that the tokens are those without drafts.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataproto.errors import InvalidConfig
from helpers.batches import prompt_batch
from helpers.prediction_heads import add_head, head_outputs
from helpers.tiny_models import tiny_model
from rollout.drafts import Drafts
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.responses import build_requests

CPU, MOST = torch.device("cpu"), 3


def few_tokens(model_type):
    """A tiny model that answers with one of four tokens."""
    model = tiny_model(model_type)
    head = model.get_output_embeddings().weight.data
    head *= 6
    head[:100], head[104:] = 0, 0
    return model.eval()


@torch.no_grad()
def counted(model, weights, prompt, positions, answer):
    """How many tokens are drafted and accepted for a greedy ``answer`` to a prompt of text, one token of it after another."""
    language, likeliest = model.model.language_model, model.get_output_embeddings()
    tokens = torch.tensor([*prompt, *answer])
    following = positions[:, -1:] + torch.arange(1, len(answer) + 1)
    positions = torch.cat([positions, following], dim=1)  # (4, T)
    embeddings = language.embed_tokens(tokens)
    states = language(inputs_embeds=embeddings[None], position_ids=positions[:, None]).last_hidden_state[0]
    ngrams = Drafts()
    ngrams.open(0, "", torch.tensor(prompt))
    drafted = accepted = read = 0
    ngrams.add(0, answer[:1])
    while read + 1 < len(answer):  # answer[read] is sampled and not read
        most = min(MOST, len(answer) - read - 1)
        last = len(prompt) + read
        draft = ngrams.next_tokens(0, most)
        if not draft:
            ahead, before = embeddings[1 : last + 1], states[:last]
            for number in range(most):
                outputs = head_outputs(model, weights, ahead, before, positions[1:, : last + number])
                draft.append(int(likeliest(outputs[-1]).argmax()))
                ahead = torch.cat([ahead, language.embed_tokens(torch.tensor(draft[-1:]))])
                before = torch.cat([before, outputs[-1:]])
        rest = answer[read + 1 :]
        equal = next((place for place, (a, b) in enumerate(zip(draft, rest)) if a != b), len(draft))
        drafted, accepted = drafted + len(draft), accepted + equal
        taken = answer[read + 1 : read + 2 + equal]
        ngrams.add(0, taken)
        read += len(taken)
    return drafted, accepted


@pytest.mark.parametrize(("model_type", "per_expert"), [("qwen3_5", False), ("qwen3_5_moe", True)])
def test_drafts_are_those_of_the_head_without_a_cache(model_type, per_expert, tmp_path):
    model = few_tokens(model_type)
    model.save_pretrained(tmp_path)
    weights = add_head(model, tmp_path, per_expert)
    engine = HFEngine(str(tmp_path), device=CPU, speculate=MOST)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = build_requests(prompt_batch(model.config, [[], []], texts=[9, 6]), sampling)
    found = sorted(engine.generate(requests, sampling), key=lambda each: each.request)
    for request, completion in zip(requests, found, strict=True):
        expected = counted(model, weights, request.input_ids.tolist(), request.position_ids, completion.token_ids)
        assert (completion.drafted_tokens, completion.accepted_tokens) == expected
    assert sum(each.accepted_tokens for each in found) > 0


def test_a_head_that_does_not_fit_is_named(tmp_path):
    model = tiny_model("qwen3_5")
    model.save_pretrained(tmp_path)
    add_head(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if name != "mtp.fc.weight"}, file, {"format": "pt"})
    HFEngine(str(tmp_path), device=CPU)  # without drafts it is not read
    with pytest.raises(InvalidConfig, match=r"mtp\.\* .* not those of one layer .*fc\.weight"):
        HFEngine(str(tmp_path), device=CPU, speculate=1)
