"""An error of one rank is raised by all ranks of a call, before any of them waits for it in a collective.

Each case breaks the rows or the engine of rank 1 only. Rank 1 raises its own error and rank 0 one that names rank 1; both are
marked as raised on all ranks, and the next call succeeds. A rank that keeps waiting fails the test by the time limit.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from benchmarks.engine_weights import differing_of_worker
from dataproto import DataProto
from dataproto.errors import DataProtoError
from dataproto.packing import MAX_TOKENS
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from helpers.tiny_prompts import tiny_tokenizer
from rollout.engine import SamplingParams
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks, raised_on_all_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, CriticWorker
from workers.roles.reward import ModelReward, ModelRewardWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
from workers.training.mini_batches import MINIBATCH

CPU = torch.device("cpu")
TYPE = "qwen3_vl"
Raised = tuple[str, str, bool]
"""Class and message of an error, and whether it was raised on all ranks."""


def rows() -> DataProto:
    """One row with an image and one without. The second row has a shorter prompt and a shorter response, so both are padded."""
    config = tiny_config(TYPE)
    return with_responses(config, prompt_batch(config, [[(4, 6)], []], texts=[4, 3]), lengths=[3, 2], width=4)


def raised_by(call: Callable[[], Any]) -> Raised:
    with pytest.raises((DataProtoError, OverflowError, RuntimeError)) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), raised_on_all_ranks(caught.value)


# Faults in rows


def on_padding(data: DataProto) -> None:
    data["response_mask"][1, 3] = 1


def without_a_prompt(data: DataProto) -> None:
    data["attention_mask"][1, :-4] = 0


def without_a_grid(data: DataProto) -> None:
    data["multi_modal_inputs"][0] = {"pixel_values": data["multi_modal_inputs"][0]["pixel_values"]}


def without_pixels(data: DataProto) -> None:
    data["multi_modal_inputs"][0] = {"image_grid_thw": data["multi_modal_inputs"][0]["image_grid_thw"]}


def of_narrow_pixels(data: DataProto) -> None:
    media = data["multi_modal_inputs"][0]
    data["multi_modal_inputs"][0] = media | {"pixel_values": media["pixel_values"][:, 1:]}


def of_arrays(data: DataProto) -> None:
    media = data["multi_modal_inputs"][0]
    data["multi_modal_inputs"][0] = media | {"image_grid_thw": media["image_grid_thw"].numpy()}


def of_no_mapping(data: DataProto) -> None:
    data["multi_modal_inputs"][1] = None


def of_three_positions(data: DataProto) -> None:
    data["position_ids"] = data["position_ids"][:, 1:]


def of_no_such_token(data: DataProto) -> None:
    data["input_ids"][0, -4] = 10**6


FAULTS = {
    on_padding: "row 1, response position 3: response_mask is 1 on a token that is not attended to",
    without_a_prompt: "row 1, response position 0: response_mask is 1 on a token that is not attended to or has no token before",
    without_a_grid: "row 0: pixel_values without image_grid_thw",
    without_pixels: "row 0: image_grid_thw without pixel_values",
    of_narrow_pixels: "row 0: 'pixel_values' is torch.float32 (24, 95), but the model takes floating-point numbers of shape",
    of_arrays: "row 0: 'image_grid_thw' is a ndarray, not a tensor",
    of_no_mapping: "'multi_modal_inputs', row 1: expected a dict, found a NoneType",
    of_three_positions: "column 'position_ids': expected (2, 4, ",
    of_no_such_token: "'input_ids', row 0, position",
}


def likelihood(outputs: Any, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    return -outputs.scores, {}


CALLS: dict[str, Callable[[Any, DataProto], Any]] = {
    "log_probs": lambda actor, data: actor.log_probs(data),
    "update": lambda actor, data: actor.update(data, likelihood),
    "update_and_score": lambda actor, data: actor.update_and_score(data, likelihood),
    "forward": lambda actor, data: actor.forward(data, likelihood),
    "forward_backward": lambda actor, data: actor.forward_backward(data, likelihood),
}


# Scenarios that all ranks run


def rows_are_refused(path: str, layout: Layout) -> dict[tuple[str, str], Raised]:
    """Every fault with one call, and every call with one fault. Ranks that share rows have the same fault."""
    ranks = init_ranks(layout, CPU)
    actor = ActorWorker(ActorConfig(path), CPU, ranks)
    bad = ranks.rank("dp") == layout.dp - 1
    found = {}
    cases = [(name, on_padding) for name in CALLS] + [("log_probs", fault) for fault in FAULTS]
    for name, fault in cases:
        broken = rows()
        if bad:
            fault(broken)
        found[name, fault.__name__] = raised_by(partial(CALLS[name], actor, broken))
    incomplete = rows()
    if bad:
        incomplete.pop(["position_ids"])
    found["log_probs", "incomplete"] = raised_by(partial(actor.log_probs, incomplete))
    assert actor.log_probs(rows())["old_log_probs"].shape == (2, 4)  # ranks are in step
    return found


def arguments_are_refused(path: str) -> list[Raised]:
    ranks = init_ranks(Layout(dp=2), CPU)
    actor = ActorWorker(ActorConfig(path), CPU, ranks)
    critic = CriticWorker(CriticConfig(path), CPU, ranks)
    found = [
        raised_by(lambda: actor.update(rows(), likelihood, epochs=0)),
        raised_by(lambda: actor.update(rows(), likelihood, epochs=1.5)),
        raised_by(lambda: actor.update(rows(), likelihood, aggregation="median")),
        raised_by(lambda: actor.update(rows(), likelihood, minibatch=1)),
        raised_by(lambda: critic.update(rows(), likelihood, entropy=True)),
    ]
    assert actor.log_probs(rows())["old_log_probs"].shape == critic.values(rows())["values"].shape
    return found


def an_empty_minibatch_is_refused(path: str) -> Raised:
    """The second of two mini-batches has no response token on either rank."""
    ranks = init_ranks(Layout(dp=2), CPU)
    actor = ActorWorker(ActorConfig(path), CPU, ranks)
    before = actor.log_probs(rows())["old_log_probs"]
    data = rows()
    data[MINIBATCH] = np.array([0, 1])
    data["response_mask"][1] = 0
    told = raised_by(lambda: actor.update(data, likelihood))
    assert torch.equal(actor.log_probs(rows())["old_log_probs"], before)
    return told


def gathered_weights(ranks: Ranks, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields weights with one collective each, as for sharded weights."""
    for name, weight in weights.items():
        ranks.all_gather(name, "dp")
        yield name, weight.to(dtype)


def engines_that_fail(path: str) -> list[Raised]:
    """On rank 1: an engine that fails to wake, and one that fails after its first weight."""
    ranks = init_ranks(Layout(dp=2), CPU)
    weights = {name: weight.detach() for name, weight in tiny_model(TYPE, seed=1).named_parameters()}
    worker = RolloutWorker(RolloutConfig(path), partial(gathered_weights, ranks, weights), ranks)
    prompts, sampling = prompt_batch(tiny_config(TYPE), [[]], texts=[3]), SamplingParams(max_tokens=2)
    wake, load = worker.engine.wake, worker.engine.load_weights

    def no_room() -> bool:
        raise OverflowError("no room")

    def load_one(pairs: Iterator[tuple[str, Tensor]]) -> None:
        next(pairs)
        raise OverflowError("loaded one")

    found = []
    for replaced in ({"wake": no_room}, {"load_weights": load_one}):
        if distributed.get_rank() == 1:
            vars(worker.engine).update(replaced)
        found.append(raised_by(lambda: worker.generate(prompts, sampling)))
        vars(worker.engine).update(wake=wake, load_weights=load)
    assert worker.sharding.stale
    assert len(worker.generate(prompts, sampling)) == 1
    assert not differing_of_worker(worker)
    return found


def missing_responses(path: str) -> Raised:
    ranks = init_ranks(Layout(dp=2), CPU)
    worker = ModelRewardWorker(ModelReward(CriticConfig(path)), path, CPU, ranks)
    data = rows()
    if distributed.get_rank() == 1:
        data.pop(["responses"])
    told = raised_by(lambda: worker.score(data))
    assert len(worker.score(rows())) == 2
    return told


def bad_losses(path: str) -> list[Raised]:
    """Loss functions that fail where they run, on the last stage of a pipeline: at the first micro-batch, at a later one, by what
    they return, and in the backward pass.
    """
    actor = ActorWorker(ActorConfig(path, token_budget=10), CPU, init_ranks(Layout(pp=2), CPU))
    assert len(actor.model.micro_batches(rows())) == 2
    called: list[int] = []

    def fails(outputs: Any, data: DataProto, at: int) -> tuple[Tensor, dict[str, Tensor]]:
        called.append(at)
        if len(called) == at:
            raise OverflowError(f"micro-batch {at}")
        return likelihood(outputs, data)

    def narrow(outputs: Any, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs.scores[:, 1:], {}

    def constant(outputs: Any, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs.scores.detach(), {}

    def in_place(outputs: Any, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = outputs.scores.exp()  # which the backward pass needs
        return -ratio.mul_(2).sqrt(), {}

    data, found = rows(), list[Raised]()
    data.meta_info[MAX_TOKENS] = 4
    assert actor.forward(data, constant).metrics == actor.forward(data, likelihood).metrics
    expected = actor.forward_backward(data, likelihood).metrics
    actor.drop_update()
    for call in (actor.update, actor.accumulate, actor.forward, actor.forward_backward):
        for loss in (partial(fails, at=1), partial(fails, at=2), narrow):
            called.clear()
            found.append(raised_by(partial(call, data, loss)))
            assert all(weight.grad is None for weight in actor.module.parameters())
    for call in (actor.update, actor.accumulate, actor.forward_backward):
        found += [raised_by(partial(call, data, loss)) for loss in (constant, in_place)]
    assert all(weight.grad is None for weight in actor.module.parameters())
    assert actor.model.optimizer.steps == 0
    assert actor.forward_backward(data, likelihood).metrics == expected  # ranks are in step
    return found


LAYOUTS = {"dp": Layout(dp=2), "pp": Layout(pp=2), "sp": Layout(sp=2), "tp": Layout(tp=2)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model(TYPE).save_pretrained(path)
    tiny_tokenizer(TYPE).save_pretrained(path)
    cases: dict[str, Callable[[], Any]] = {
        name: partial(rows_are_refused, str(path), layout) for name, layout in LAYOUTS.items()
    }
    for each in (
        arguments_are_refused,
        an_empty_minibatch_is_refused,
        engines_that_fail,
        missing_responses,
        bad_losses,
    ):
        cases[each.__name__] = partial(each, str(path))
    return run_ranks(2, cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_one_rank_refuses_are_refused_by_all(outcomes, layout):
    mine, theirs = outcomes[layout]
    assert not isinstance(theirs, str), theirs
    assert not isinstance(mine, str), mine
    assert theirs.keys() == mine.keys()
    for case, (kind, message, told) in theirs.items():
        assert FAULTS.get(globals().get(case[1]), "position_ids") in message, case
        assert kind != "RankFailure"
        assert told, case
        other, other_message, other_told = mine[case]
        assert other_told, case
        if layout == "dp":
            assert (other, other_message) == ("RankFailure", f"rank 1: {kind}: {message}")
        else:
            assert (other, other_message) == (kind, message)


def test_invalid_arguments_are_refused_on_all_ranks(outcomes):
    for refused in outcomes["arguments_are_refused"]:
        assert not isinstance(refused, str), refused
        assert all(kind == "InvalidConfig" and told for kind, _, told in refused)
        for (_, message, _), text in zip(
            refused, ("epochs=0", "epochs=1.5", "'median'", "minibatch=1", "no entropy"), strict=True
        ):
            assert text in message


def test_a_minibatch_without_response_tokens_is_refused_before_any_update(outcomes):
    told = "InvalidColumn", "none of the 2 rows of mini-batch 1 has a response token to learn from", True
    assert outcomes["an_empty_minibatch_is_refused"] == [told, told]


def test_after_an_engine_failure_ranks_stay_in_step(outcomes):
    mine, theirs = outcomes["engines_that_fail"]
    assert theirs == [("OverflowError", "no room", True), ("OverflowError", "loaded one", True)]
    assert mine == [("RankFailure", f"rank 1: OverflowError: {text}", True) for text in ("no room", "loaded one")]


def test_a_loss_that_fails_on_the_last_stage_is_told_on_the_others(outcomes):
    first, last = outcomes["bad_losses"]
    assert not isinstance(last, str), last
    narrow = ("InvalidColumn", "the loss function returned (1, 3) as ")
    expected = [("OverflowError", "micro-batch 1"), ("OverflowError", "micro-batch 2"), narrow] * 4
    constant = ("InvalidColumn", "the loss function returned a loss without gradient")
    in_place = (
        "RuntimeError",
        "one of the variables needed for gradient computation has been modified by an inplace operation",
    )
    expected += [constant, in_place] * 3
    for mine, (kind, message, told), (its_kind, text) in zip(first, last, expected, strict=True):
        assert (kind, told) == (its_kind, True)
        assert message.startswith(text)
        assert mine == ("RankFailure", f"rank 1: {kind}: {message}", True)


def test_missing_responses_on_one_rank_are_refused_by_all(outcomes):
    mine, theirs = outcomes["missing_responses"]
    assert (theirs[0], theirs[2]) == ("MissingColumn", True)
    assert (mine[0], mine[2]) == ("RankFailure", True)
