"""FSDP2 over two processes against one process and against Hugging Face's own forward row by row, in float32: log-probs within
1e-5 absolute, each parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto import DataProto
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import MODEL_TYPES, tiny_config, tiny_model
from workers.actor import ActorConfig, ActorWorker
from workers.layout import Layout
from workers.mesh import Ranks, join
from workers.optimizer import OptimizerConfig
from workers.weights import full_tensor

CPU = torch.device("cpu")
FREE = OptimizerConfig(lr=1e-2, max_grad_norm=1e9)  # clipping would hide a wrong scale
CLIPPED = OptimizerConfig(lr=1e-2, max_grad_norm=0.1)


def folder() -> Path:
    """Where the test has put the checkpoints, in an environment variable that the ranks inherit."""
    return Path(os.environ["TEST_FSDP_FOLDER"])


def two() -> Ranks:
    return join(Layout(dp=2), CPU)


def actor(model_type: str, ranks: Ranks | None = None, optimizer: OptimizerConfig = FREE, **options) -> ActorWorker:
    return ActorWorker(ActorConfig(str(folder() / model_type), optimizer=optimizer, **options), CPU, ranks)


def mixed_rows(model_type: str) -> DataProto:
    """Two images of unequal size, one, none, an image that two prompts share, samples of one prompt, no response, inert."""
    config = tiny_config(model_type)
    grids = [[(4, 6), (8, 4)], [(6, 6)], [], [(6, 6)]]
    prompts = prompt_batch(config, grids, texts=[4, 7, 5, 3])[[0, 0, 1, 2, 2, 3, 0, 1]]
    data = with_responses(config, prompts, lengths=[5, 4, 1, 6, 2, 3, 0, 3], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    inert = data[7:]
    for name in ("attention_mask", "response_mask", "mm_token_type_ids"):
        inert[name] = torch.zeros_like(inert[name])
    inert["multi_modal_inputs"] = np.array([{}], dtype=object)
    return DataProto.concat([data[:7], inert])


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {"actor/mean_log_prob": outputs.log_probs}


def gradients_of(worker: ActorWorker, data: DataProto, **options):
    """Metrics of one update that leaves the weights alone, and the whole gradient of each parameter that has one."""
    found = {}

    def capture():
        for name, parameter in worker.module.model.named_parameters():
            if parameter.grad is not None:
                found[name] = full_tensor(parameter.grad).clone()

    worker.optimizer.adamw.step = capture
    return worker.update(data, pg_loss, **options), found


def assert_close_gradients(found, expected):
    for name in expected.keys() | found.keys():
        ours, theirs = (grads.get(name, torch.zeros(())) for grads in (found, expected))
        error = (ours - theirs).norm()
        assert error <= 1e-4 * theirs.norm() + 1e-9, f"{name}: {error} of {theirs.norm()}"


SPLITS = {
    "even": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "uneven": ([0, 1, 2, 4, 5], [3, 6, 7]),
    "one has none": (list(range(8)), []),
}


def equals_one_process(model_type: str, split: str, token_budget: int, **options) -> None:
    """However rows are split over ranks and micro-batches, the update is that of one process with all rows."""
    ranks, data = two(), mixed_rows(model_type)
    aggregation = "seq-mean-token-sum-norm" if split == "uneven" else "token-mean"
    metrics, expected = gradients_of(actor(model_type, token_budget=10_000), data, aggregation=aggregation)
    mine = data[SPLITS[split][ranks.rank("dp")]]
    worker = actor(model_type, ranks, token_budget=token_budget, **options)
    ours, found = gradients_of(worker, mine, aggregation=aggregation)
    for name in ("actor/loss", "actor/mean_log_prob", "actor/grad_norm"):
        assert ours[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    assert_close_gradients(found, expected)


def equals_row_by_row(model_type: str) -> None:
    """Log-probs and gradients are those of Hugging Face's forward."""
    ranks, data = two(), mixed_rows(model_type)
    model = tiny_model(model_type)
    expected = torch.cat([padded_log_probs(model, data[:7]), torch.zeros(1, 6)])
    weights = data["response_mask"] / data["response_mask"].sum()
    (-expected * data["advantages"] * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    chosen = SPLITS["uneven"][ranks.rank("dp")]
    worker = actor(model_type, ranks, token_budget=40)
    found = worker.log_probs(data[chosen])["old_log_probs"]
    torch.testing.assert_close(found, expected.detach()[chosen], atol=1e-5, rtol=0)
    order = list(reversed(range(len(chosen))))
    torch.testing.assert_close(worker.log_probs(data[chosen][order])["old_log_probs"], found[order], atol=1e-5, rtol=0)
    assert_close_gradients(gradients_of(worker, data[chosen])[1], gradients)


SCENARIOS = {
    **{
        f"{model_type}, {split}, {budget} tokens": partial(equals_one_process, model_type, split, budget)
        for model_type in MODEL_TYPES
        for split in SPLITS
        for budget in (10_000, 30)
    },
    **{f"{model_type}, row by row": partial(equals_row_by_row, model_type) for model_type in MODEL_TYPES},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("fsdp")
    for model_type in MODEL_TYPES:
        tiny_model(model_type).save_pretrained(root / model_type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FSDP_FOLDER", str(root))
        return run_ranks(2, SCENARIOS, root)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(outcomes, name):
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome is None, f"rank {rank}: {outcome}"
