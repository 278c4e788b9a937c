"""Ranks of processes from given placements, and on a Ray cluster of two nodes over which the processes are scattered."""

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from workers.cluster.placement import Placement, rank_order, thread_shares
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import StepBlobs
from workers.cluster.ray_launcher import PlannedPool, RayPool
from workers.ranks.layout import Layout


def place(ip: str, *gpus: object, node: str | None = None, cores: int = 8) -> Placement:
    return Placement(ip, node or ip, tuple(map(str, gpus)), cores)


def test_processes_are_ordered_by_node_and_gpu():
    places = [
        place("10.0.0.2", 1),
        place("10.0.0.10", 0),
        place("10.0.0.2", 10),
        place("10.0.0.10", 3),
        place("10.0.0.2", 9),
    ]
    assert rank_order(places) == [0, 4, 2, 1, 3]  # 2 before 10, of addresses and of GPUs


def test_processes_without_gpus_or_with_the_same_one_keep_their_order():
    assert rank_order([place("10.0.0.1")] * 3) == [0, 1, 2]
    assert rank_order([place("10.0.0.1", 1), place("10.0.0.1", 0), place("10.0.0.1", 1)]) == [1, 0, 2]


def test_nodes_with_the_same_address_are_distinguished():
    places = [place("127.0.0.1", 0, node="b"), place("127.0.0.1", 0, node="a"), place("127.0.0.1", 1, node="b")]
    assert rank_order(places) == [1, 0, 2]


@given(
    st.lists(st.builds(place, st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.1.1"]), st.integers(0, 15)), max_size=20)
)
def test_ranks_are_a_permutation_and_those_of_a_node_are_consecutive(places):
    order = rank_order(places)
    assert sorted(order) == list(range(len(places)))
    nodes = [places[process].node for process in order]
    changes = sum(one != other for one, other in zip(nodes, nodes[1:]))
    assert changes == max(0, len(set(nodes)) - 1)


@given(st.lists(st.builds(place, st.sampled_from("abc"), cores=st.integers(1, 64)), min_size=1, max_size=20))
def test_threads_never_exceed_the_cores_of_a_node(places):
    cores = {each.node: each.cores for each in places}  # the same in all placements of a node
    places = [place(each.ip, cores=cores[each.node]) for each in places]
    shares = thread_shares(places)
    for node, count in cores.items():
        mine = [share for share, each in zip(shares, places) if each.node == node]
        assert min(mine) == max(mine) >= 1
        assert sum(mine) <= max(count, len(mine))
        assert sum(mine) > count - len(mine)  # at most the remainder is left


@pytest.mark.long
def test_ranks_of_a_scattered_placement_group_are_consecutive_on_their_nodes(monkeypatch):
    """Four processes on two nodes of two GPUs each, placed by Ray on both nodes alternately."""
    monkeypatch.setattr("workers.cluster.ray_group.placement_group", spread(ray.util.placement_group))
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=100 * 2**20)
    try:
        ray.init(cluster.address, log_to_driver=False)
        pool = RayPool(PlannedPool(Layout(dp=4), RayConfig()), StepBlobs())
        pool.connect()
        bundles = ray.util.placement_group_table(pool.placement_group)["bundles_to_node_id"]
        first, second, third, fourth = (bundles[number] for number in range(4))
        assert len({first, second}) == len({third, fourth}) == 2  # scattered: neighbours would be on both nodes
        found = [(each.node, each.gpus) for each in pool.placements]
        assert found == sorted(found)
        assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
        assert [gpus for _, gpus in found] == [("0",), ("1",)] * 2
        pool.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def spread(placement_group):
    return lambda bundles, strategy: placement_group(bundles, strategy="SPREAD")
