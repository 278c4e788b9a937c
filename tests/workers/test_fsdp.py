"""FSDP2 over two processes against one process and against Hugging Face's own forward row by row, in float32: log-probs within
1e-5 absolute, each parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

import os
from functools import partial
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig, MediaMismatch, RankFailure
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.metrics import learned
from helpers.processes import run_ranks
from helpers.tiny_models import MODEL_TYPES, TEXT_TYPES, rounding, tiny_config, tiny_model
from workers.model import named_weights as weights
from workers.model.named_weights import full_tensor
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training.accounting import required_work
from workers.training.micro_batches import inert_rows, micro_batches
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
DP = Layout(dp=2)
FREE = OptimizerConfig(lr=1e-2, max_grad_norm=1e9)  # clipping would hide a wrong scale
CLIPPED = OptimizerConfig(lr=1e-2, max_grad_norm=0.1)


def folder() -> Path:
    """Where the test has put the checkpoints, in an environment variable that the ranks inherit."""
    return Path(os.environ["TEST_FSDP_FOLDER"])


def two() -> Ranks:
    return init_ranks(DP, CPU)


def actor(model_type: str, ranks: Ranks | None = None, optimizer: OptimizerConfig = FREE, **options) -> ActorWorker:
    return ActorWorker(ActorConfig(str(folder() / model_type), optimizer=optimizer, **options), CPU, ranks)


def mixed_rows(model_type: str) -> DataProto:
    """Two images of unequal size, one, none, an image that two prompts share, samples of one prompt, no response, inert."""
    config = tiny_config("qwen2_5_vl" if model_type == "tied" else model_type)
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

    worker.model.optimizer.adamw.step = capture
    return worker.update(data, pg_loss, **options), found


def assert_close_gradients(found, expected):
    for name in expected.keys() | found.keys():
        ours, theirs = (grads.get(name, torch.zeros(())) for grads in (found, expected))
        error = (ours - theirs).norm()
        assert error <= 1e-4 * theirs.norm() + rounding(name), f"{name}: {error} of {theirs.norm()}"


SPLITS = {
    "even": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "uneven": ([0, 1, 2, 4, 5], [3, 6, 7]),
    "images on one rank": ([0, 1, 2, 5, 6], [3, 4]),
    "rows on one rank": (list(range(8)), []),
}


def equals_one_process(model_type: str, split: str, token_budget: int, layout: Layout = DP, **options) -> None:
    """However rows are split over ranks and micro-batches, the update is that of one process with all rows."""
    ranks, data = init_ranks(layout, CPU), mixed_rows(model_type)
    aggregation = "seq-mean-token-sum-norm" if split == "uneven" else "token-mean"
    alone = {name: value for name, value in options.items() if name.startswith(("freeze", "lora"))}
    metrics, expected = gradients_of(actor(model_type, token_budget=10_000, **alone), data, aggregation=aggregation)
    mine = data if layout.dp == 1 else data[SPLITS[split][ranks.rank("dp")]]
    worker = actor(model_type, ranks, token_budget=token_budget, **options)
    ours, found = gradients_of(worker, mine, aggregation=aggregation)
    for name in ("actor/loss", "actor/mean_log_prob", "actor/grad_norm"):
        assert ours[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    assert_close_gradients(found, expected)
    learns = model_type not in TEXT_TYPES and not options.get("freeze_vision")
    assert any("visual" in name or "vision" in name for name in found) == learns


def updates_equal_one_process(model_type: str, **options) -> None:
    """After three clipped steps over mini-batches that were shared out, the weights, as an engine gets them, are the same."""
    ranks, data = two(), mixed_rows(model_type)
    weights = []
    for worker, rows in (
        (actor(model_type, optimizer=CLIPPED), data),
        (actor(model_type, ranks, CLIPPED, token_budget=30, **options), share_out(data, 2, 2)[ranks.rank("dp")]),
    ):
        # At 1e-8 an element without gradient moves by the learning rate, to either side.
        with patch("workers.training.optimizer.EPS", 1e-3):
            metrics = worker.update(rows, pg_loss, minibatch=2)
            assert worker.model.optimizer.steps == 2
            assert metrics["actor/grad_norm"] > CLIPPED.max_grad_norm
            worker.update(data[[0, 3]] if worker.model.ranks.mesh is None else data[[3 * ranks.rank("dp")]], pg_loss)
        weights.append({name: weight.clone() for name, weight in worker.named_weights()})
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=2e-5, rtol=0, msg=name)


def text_alone_leaves_the_tower_alone(model_type: str) -> None:
    """Without media on any rank no rank runs the vision tower; with media on one rank all do."""
    ranks, data = two(), mixed_rows(model_type)
    worker = actor(model_type, ranks)
    runs = []
    worker.module.model.get_submodule(worker.module.family.vision_tower).register_forward_hook(
        lambda *_: runs.append(1)
    )
    _, found = gradients_of(worker, data[[3 + ranks.rank("dp")]])
    assert not runs
    assert not any("visual" in name for name in found)
    worker.log_probs(data[[2 + ranks.rank("dp")]])
    assert len(runs) == 1


def an_inert_micro_batch_reaches_every_weight(model_type: str, layout: Layout) -> None:
    """Ranks reduce gradients together, so a rank without rows has them for the same weights as the others: zeros."""
    worker = actor(model_type, init_ranks(layout, CPU))
    module = worker.module.train()
    forward_rows(module, inert_rows(module), CPU, entropy=True, tower=True).log_probs.sum().backward()
    for name, parameter in module.model.named_parameters():
        assert parameter.grad is not None, name
        assert not full_tensor(parameter.grad).any(), name


def a_non_finite_gradient_skips_the_step_everywhere(model_type: str) -> None:
    """A picture that is not a number on the last rank: no rank steps, and all name its row."""
    ranks, data = two(), mixed_rows(model_type)
    media = data["multi_modal_inputs"][5]
    data["multi_modal_inputs"][5] = media | {"pixel_values": media["pixel_values"] * float("nan")}
    data["uid"] = np.array([f"row-{row}" for row in range(len(data))], dtype=object)
    worker = actor(model_type, ranks, token_budget=30)
    before = {name: weight.clone() for name, weight in worker.named_weights()}
    metrics = worker.update(data[SPLITS["even"][ranks.rank("dp")]], pg_loss)
    assert metrics["actor/skipped_steps"] == 1
    assert [(skip.step, skip.rows) for skip in worker.model.skipped] == [(0, ("row-5",))]
    assert all(torch.equal(weight, before[name]) for name, weight in worker.named_weights())
    assert worker.update(data[[ranks.rank("dp")]], pg_loss)["actor/skipped_steps"] == 1


def refused_rows_are_refused_everywhere(model_type: str) -> None:
    """Rows that one rank must refuse, because they were cut through an image, leave no other rank waiting."""
    ranks, data = two(), mixed_rows(model_type)
    worker = actor(model_type, ranks)
    rows = data[[5]]
    if ranks.rank("dp") == 1:
        picture = rows["mm_token_type_ids"][0].nonzero()[0]
        for name in ("attention_mask", "mm_token_type_ids"):
            rows[name][0, : picture + 1] = 0
    error, message = (
        (MediaMismatch, "row 0: .* cut through") if ranks.rank("dp") else (RankFailure, "rank 1: MediaMismatch")
    )
    for call in (worker.log_probs, partial(worker.update, loss_fn=pg_loss)):
        with pytest.raises(error, match=message):
            call(rows)
    with pytest.raises(InvalidConfig, match="share_out"):
        worker.update(data[:2], pg_loss, minibatch=1)
    with pytest.raises(InvalidConfig, match="needs 4 processes"):
        init_ranks(Layout(dp=4), CPU)


def saving_and_loading_continues_to_the_bit(model_type: str, **options) -> None:
    """The export loads with Hugging Face; training goes on from the rest."""
    ranks, data = two(), mixed_rows(model_type)
    mine, target = data[SPLITS["uneven"][ranks.rank("dp")]], folder() / f"saved-{len(options)}"
    saved, other = (actor(model_type, ranks, **options) for _ in range(2))
    saved.update(mine, pg_loss)
    saved.save(target)
    other.load(target)
    assert learned(saved.update(mine, pg_loss)) == learned(other.update(mine, pg_loss))
    for (name, one), (_, two_) in zip(saved.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(one, two_), name
    ranks.all_gather(None, "dp")
    again = ReferenceWorker(PolicyConfig(str(target / "huggingface")), CPU, ranks)
    other.load(target)
    ours, theirs = other.log_probs(mine)["old_log_probs"], again.log_probs(mine)["ref_log_prob"]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def half_precision_is_near(model_type: str) -> None:
    """With weights gathered in bfloat16 log-probs are near those in float32, and masters stay float32."""
    ranks, data = two(), mixed_rows(model_type)
    expected = actor(model_type).log_probs(data)["old_log_probs"]
    worker = actor(model_type, ranks, dtype="bfloat16")
    rows = SPLITS["uneven"][ranks.rank("dp")]
    found = worker.log_probs(data[rows])["old_log_probs"]
    assert 0 < (found - expected[rows]).abs().max() < 0.1
    worker.update(data[rows], pg_loss)
    whole = dict(worker.named_weights())
    assert all(weight.dtype == torch.float32 for weight in whole.values())
    for bucket_bytes in (weights.BUCKET_BYTES, 3000):
        with mock.patch.object(weights, "BUCKET_BYTES", bucket_bytes):
            halves = dict(worker.named_weights(torch.bfloat16))
        assert list(halves) == list(whole)
        for name, half in halves.items():
            wanted = whole[name] if worker.module.family.in_float32(name) else whole[name].bfloat16()
            assert half.dtype == wanted.dtype, name
            assert torch.equal(half, wanted), name


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


VISION_LORA = {"lora_rank": 2, "lora_vision": True}


def slices_share_a_micro_batch():
    """The token budget is a rank's own: two that share a sequence take a micro-batch of twice as many tokens."""
    rows = mixed_rows("qwen2_5_vl")
    alone = actor("qwen2_5_vl")
    half = -(-required_work(alone.module, rows).tokens // 2)
    assert len(micro_batches(rows, alone.module, half)) > 1
    together = actor("qwen2_5_vl", init_ranks(Layout(sp=2), CPU), token_budget=half)
    assert len(together.model.micro_batches(rows)) == 1


def decays_stay_in_float32():
    """The parameters of a recurrence that must not be rounded are gathered as they are; projections in bfloat16."""
    worker, seen = actor("qwen3_5", two(), dtype="bfloat16"), {}
    mixer = worker.module.model.model.language_model.layers[0].linear_attn
    for part, name in ((mixer, "A_log"), (mixer, "dt_bias"), (mixer.out_proj, "weight")):
        part.register_forward_pre_hook(lambda used, _, name=name: seen.update({name: getattr(used, name).dtype}))
    worker.log_probs(mixed_rows("qwen3_5")[:2])
    assert seen == {"A_log": torch.float32, "dt_bias": torch.float32, "weight": torch.bfloat16}


FEW = ("qwen2_5_vl", "qwen3_vl")
BY_ROW = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "internvl", "qwen3")
SCENARIOS = {
    **{f"{model_type}, row by row": partial(equals_row_by_row, model_type) for model_type in BY_ROW},
    **{f"{each}, uneven, 30 tokens": partial(equals_one_process, each, "uneven", 30) for each in FEW},
    "qwen3_vl, images on one rank, 10,000 tokens": partial(
        equals_one_process, "qwen3_vl", "images on one rank", 10_000
    ),
    "rows on one rank": partial(equals_one_process, "qwen3_vl_moe", "rows on one rank", 30),
    "reduced once": partial(equals_one_process, "qwen3_vl", "images on one rank", 30, unsharded="gradients"),
    "reduced once, sp": partial(equals_one_process, "qwen2_5_vl", "even", 20, Layout(sp=2), unsharded="gradients"),
    "offload": partial(equals_one_process, "qwen2_5_vl", "even", 30, offload=True),
    "adapters": partial(equals_one_process, "qwen3_vl", "images on one rank", 30, **VISION_LORA),
    "tied": partial(equals_one_process, "tied", "even", 30),
    "frozen, images on one rank": partial(equals_one_process, "qwen3_vl", "images on one rank", 30, freeze_vision=True),
    "frozen, rows on one rank": partial(equals_one_process, "qwen2_vl", "rows on one rank", 30, freeze_vision=True),
    "frozen decoder": partial(equals_one_process, "smolvlm", "images on one rank", 30, freeze_language=True),
    "sp": partial(equals_one_process, "qwen3_vl_moe", "even", 30, Layout(sp=2)),
    "three steps": partial(updates_equal_one_process, "qwen2_5_vl"),
    "three steps, kept gathered": partial(updates_equal_one_process, "qwen3_vl", unsharded="weights"),
    "three steps, offload": partial(updates_equal_one_process, "qwen3_vl", offload=True),
    **{
        f"inert, {layout}, {model_type}": partial(an_inert_micro_batch_reaches_every_weight, model_type, layout)
        for layout, model_type in (
            (DP, "qwen2_5_vl"),
            *((each, "qwen3_vl_moe") for each in (DP, Layout(sp=2), Layout(tp=2))),
        )
    },
    "text alone": partial(text_alone_leaves_the_tower_alone, "qwen2_5_vl"),
    "not finite": partial(a_non_finite_gradient_skips_the_step_everywhere, "qwen2_5_vl"),
    "refused": partial(refused_rows_are_refused_everywhere, "qwen3_vl"),
    "saved": partial(saving_and_loading_continues_to_the_bit, "qwen2_5_vl"),
    "saved adapters": partial(saving_and_loading_continues_to_the_bit, "qwen2_5_vl", **VISION_LORA),
    "token budget": slices_share_a_micro_batch,
    "half precision": partial(half_precision_is_near, "qwen2_5_vl"),
    "half precision, recurrent": partial(half_precision_is_near, "qwen3_5"),
    "decays": decays_stay_in_float32,
}

MORE_SCENARIOS = {
    **{
        f"reduced once, {model_type}": partial(equals_one_process, model_type, "uneven", 30, unsharded="gradients")
        for model_type in MODEL_TYPES
    },
    "reduced once, rows on one rank": partial(
        equals_one_process, "qwen3_vl_moe", "rows on one rank", 30, unsharded="gradients"
    ),
    "reduced once, offload": partial(equals_one_process, "qwen2_5_vl", "even", 30, offload=True, unsharded="gradients"),
    "three steps, reduced once": partial(updates_equal_one_process, "qwen3_vl", unsharded="gradients"),
    **{f"{each}, row by row": partial(equals_row_by_row, each) for each in MODEL_TYPES if each not in BY_ROW},
    **{
        f"{model_type}, {split}, {budget} tokens": partial(equals_one_process, model_type, split, budget)
        for split, budget in (("uneven", 30), ("images on one rank", 10_000))
        for model_type in MODEL_TYPES
        if model_type not in FEW and (split == "uneven" or model_type in ("qwen2_vl", "glm4v"))
    },
    **{
        f"inert, {DP}, {model_type}": partial(an_inert_micro_batch_reaches_every_weight, model_type, DP)
        for model_type in MODEL_TYPES
        if model_type not in ("qwen2_5_vl", "qwen3_vl_moe")
    },
}


@pytest.fixture(scope="module")
def folder_of_checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("fsdp")
    for model_type in MODEL_TYPES:
        tiny_model(model_type).save_pretrained(root / model_type)
    tied = tiny_config("qwen2_5_vl")
    tied.tie_word_embeddings = tied.text_config.tie_word_embeddings = True
    tiny_model("qwen2_5_vl", config=tied).save_pretrained(root / "tied")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FSDP_FOLDER", str(root))
        yield root


@pytest.fixture(scope="module")
def outcomes(folder_of_checkpoints, tmp_path_factory):
    return run_ranks(2, SCENARIOS, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def more_outcomes(folder_of_checkpoints, tmp_path_factory):
    return run_ranks(2, MORE_SCENARIOS, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(outcomes, name):
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome is None, f"rank {rank}: {outcome}"


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_SCENARIOS)
def test_two_ranks_with_more_models(more_outcomes, name):
    for rank, outcome in enumerate(more_outcomes[name]):
        assert outcome is None, f"rank {rank}: {outcome}"
