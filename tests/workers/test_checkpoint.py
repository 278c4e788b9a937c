import random

import numpy as np
import pytest
import torch

from dataproto.errors import CheckpointError
from helpers.tiny_models import MODEL_TYPES, tiny_model
from workers.checkpoint import (
    checkpoint_steps,
    latest_checkpoint,
    load_weights_into,
    random_states,
    set_random_states,
    writing_checkpoint,
)


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    with writing_checkpoint(tmp_path, 1) as directory:
        (directory / "a").write_text("one")
    with pytest.raises(OSError, match="disk full"), writing_checkpoint(tmp_path, 2) as directory:
        (directory / "a").write_text("half")
        raise OSError("disk full")
    assert latest_checkpoint(tmp_path) == (1, tmp_path / "global_step_1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["global_step_1"]


def test_a_draft_left_by_a_killed_run_is_ignored_and_replaced(tmp_path):
    draft = tmp_path / ".global_step_3.partial"
    draft.mkdir()
    (draft / "stale").write_text("x")
    assert latest_checkpoint(tmp_path) is None
    with writing_checkpoint(tmp_path, 3) as directory:
        (directory / "a").write_text("fresh")
    assert [entry.name for entry in (tmp_path / "global_step_3").iterdir()] == ["a"]


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 10, 30):
        with writing_checkpoint(tmp_path, step, keep=2) as directory:
            (directory / "a").write_text("x")
    assert checkpoint_steps(tmp_path) == [10, 30]


def test_random_states_survive_a_file_that_runs_no_code(tmp_path):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    torch.save(random_states(), tmp_path / "rng.pt")
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    set_random_states(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = tiny_model("qwen2_5_vl")
    with pytest.raises(CheckpointError, match="no Hugging Face checkpoint"):
        load_weights_into(model, tmp_path)
    state = model.state_dict()
    del state["model.visual.merger.ln_q.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"missing_keys.*merger\.ln_q\.weight"):
        load_weights_into(model, tmp_path)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weights_round_trip_to_the_bit(tmp_path, model_type):
    saved, other = tiny_model(model_type, seed=0), tiny_model(model_type, seed=1)
    saved.save_pretrained(tmp_path)
    load_weights_into(other, tmp_path)
    for name, weight in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
