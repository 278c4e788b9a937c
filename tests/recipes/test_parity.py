import re

import numpy as np
import pytest
import torch

from dataproto import DataProto
from recipes.algorithms.mismatch import differences
from recipes.demo.tiny_model import make_tiny_model
from recipes.parity import comparison_table, main

FEW = ["--rows", "4", "--n", "2", "--max-response-length", "8"]


def largest(text):
    return float(re.search(r"^max (\S+)$", text, re.MULTILINE).group(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def test_the_hf_engine_agrees_with_the_actor(model, capsys):
    assert main(["--engine", "hf", "--model-path", model, "--tolerance", "1e-4", *FEW]) == 0
    out = capsys.readouterr().out
    assert largest(out) < 1e-4
    assert re.search(r"^text +\d+ ", out, re.MULTILINE)
    assert re.search(r"^images +\d+ ", out, re.MULTILINE)


@pytest.mark.vllm
def test_vllm_agrees_with_the_actor(capsys):
    assert main(["--tolerance", "1e-4", *FEW]) == 0
    out = capsys.readouterr().out
    assert 0 < largest(out) < 1e-4


def test_a_difference_beyond_the_tolerance_ends_with_status_1(model, capsys):
    assert main(["--engine", "hf", "--model-path", model, "--tolerance", "1e-12", *FEW]) == 1
    assert "exceeds --tolerance 1e-12" in capsys.readouterr().out


def test_mistakes_are_one_line(capsys):
    assert main(["--engine", "sglang"]) == 2
    assert "engine 'sglang' is unknown" in capsys.readouterr().err
    assert main(["--model-path", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_rows_are_told_apart_by_hand():
    actor = torch.tensor([[0.5, 0.25, 0.9], [0.5, 0.5, 0.9]]).log()
    engine = torch.tensor([[0.5, 0.5, 0.1], [0.25, 0.5, 0.1]]).log()
    media = np.array([{"pixel_values": torch.zeros(1)}, {}], dtype=object)
    data = DataProto.from_dict(
        {"rollout_log_probs": engine, "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])},
        {"multi_modal_inputs": media},
    )
    found = differences(data, actor)
    assert found["all"].tokens == 4
    assert found["images"].ratio_mean == pytest.approx((1 + 0.5) / 2)
    assert found["text"].ratio_mean == pytest.approx((2 + 1) / 2)
    assert found["text"].max == pytest.approx(np.log(2))
    assert found["all"].mean == pytest.approx(np.log(2) / 2)
    assert found["all"].ratio_off == 0.5
    assert comparison_table(found)[-1] == "max 6.931e-01"
    assert "text" not in differences(data[:1], actor[:1])
