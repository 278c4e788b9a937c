"""The Hugging Face engine on a pretended second device: the tokens of the host, and copies to it that nothing waits for."""

import pytest
import torch

from helpers.batches import prompt_batch
from helpers.second_device import DEVICE, second_device
from helpers.tiny_models import tiny_model
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.responses import build_requests

CPU = torch.device("cpu")
STEPS = 10  # of five tokens of six samples in four places


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3"])
def test_the_engine_copies_to_the_device_without_waiting(model_type, tmp_path, monkeypatch):
    # The pretended device does not see operations of inference mode one by one.
    monkeypatch.setattr(HFEngine, "poll", torch.no_grad()(HFEngine.poll.__wrapped__))
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    prompts = prompt_batch(model.config, [[(4, 6)], [(6, 6)], []], texts=[4, 7, 3])
    sampling = SamplingParams(n=2, temperature=0.7, max_tokens=5, seed=1)

    def generate(device, waits):
        engine = HFEngine(str(tmp_path), device=device, max_num_seqs=4)
        waits.clear()  # of loading
        found = list(engine.generate(build_requests(prompts, sampling), sampling))
        return [each.token_ids for each in found]

    expected = generate(CPU, [])
    with second_device() as waits:
        assert generate(DEVICE, waits) == expected
    assert "rollout.hf.decoder" not in waits
    assert waits.count("rollout.hf.engine") == 2 * STEPS  # for the tokens of each step and their log-probs
