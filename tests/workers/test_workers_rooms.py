"""The public names of the rooms model, ranks and cluster."""

import pytest

import workers.cluster
import workers.model
import workers.ranks

PUBLIC_NAMES = {
    workers.cluster: ["LaunchPlan", "LocalGroup", "RayConfig", "Roles", "launch", "launch_worker"],
    workers.model: ["ModelConfig", "Outputs", "PackedVLM", "compute_dtype"],
    workers.ranks: ["AXES", "Arguments", "Dispatch", "Layout", "Ranks", "dispatch", "init_ranks"],
}


@pytest.mark.parametrize("room", PUBLIC_NAMES, ids=lambda room: room.__name__)
def test_a_room_exports_exactly_its_public_names(room):
    assert sorted(room.__all__) == PUBLIC_NAMES[room]
    assert all(hasattr(room, name) for name in room.__all__)
