"""Layouts, local groups, and how results of several ranks are joined."""

import inspect

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import ColumnConflict, InvalidConfig
from recipes.demo.tiny_model import make_tiny_model
from workers.cluster.local import LocalGroup
from workers.ranks.dispatch_modes import dispatch, join_rows
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker


class Doubler:
    @dispatch("dp")
    def double(self, x):
        return 2 * x

    @dispatch("all")
    def fail(self):
        raise OverflowError("too much")

    def private(self):
        return 1

    @dispatch("all")
    def calling_code(self):
        return inspect.currentframe().f_back.f_code


def test_ranks_have_distinct_coordinates():
    layout = Layout(dp=2, tp=2, pp=2, sp=3)
    seen = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    assert layout.world_size == 24
    assert len(set(seen)) == 24
    assert layout.coordinates(1) == {"pp": 0, "dp": 0, "sp": 0, "tp": 1}
    assert layout.coordinates(6) == {"pp": 0, "dp": 1, "sp": 0, "tp": 0}


@pytest.mark.parametrize("degrees", [{"dp": 0}, {"tp": 1.5}, {"dp": 3, "ep": 2}])
def test_impossible_layouts_are_refused(degrees):
    with pytest.raises(InvalidConfig, match="layout"):
        Layout(**degrees)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": True}, "offload=True .* needs dp x sp > 1"),
        ({"pipeline_layers": (1, 1)}, r"pipeline_layers=\(1, 1\) .* pp > 1"),
    ],
)
def test_options_for_another_layout_are_refused(options, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message):
        ActorWorker(ActorConfig(str(make_tiny_model(tmp_path / "model")), **options))


def test_a_group_calls_dispatched_methods_only():
    group = LocalGroup(Doubler())
    assert group.double(4) == 8
    assert group.submit("double", 5).result() == 10
    with pytest.raises(InvalidConfig, match=r"no method 'private'.*\['calling_code', 'double', 'fail'\]"):
        group.private()


def test_a_call_through_a_local_group_adds_no_frame():
    assert LocalGroup(Doubler()).calling_code() is inspect.currentframe().f_code


def test_a_future_holds_the_exception():
    future = LocalGroup(Doubler()).submit("fail")
    assert isinstance(future.exception(), OverflowError)


def test_rollouts_are_padded_to_the_widest_when_joined():
    parts = [
        DataProto.from_dict({"response_mask": torch.ones(rows, width), "advantages": torch.ones(rows, width)})
        for rows, width in ((2, 3), (1, 1), (0, 5))
    ]
    with pytest.raises(ColumnConflict, match="cannot be joined"):  # not marked as rollouts by max_tokens
        join_rows(parts)
    for part in parts:
        part.meta_info["max_tokens"] = 5
    joined = join_rows(parts)
    assert joined["response_mask"].tolist() == joined["advantages"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
