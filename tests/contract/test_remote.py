"""Two value stores on two nodes: what one writes the other reads, and nothing is mapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane.errors import KeyNotFound
from tests.contract.planes import Plane, TwoNodes, ray_hosted, spying_on_segments

pytestmark = [pytest.mark.ray, pytest.mark.kinds("ray-remote")]


@pytest.fixture
def nodes(plane: Plane) -> TwoNodes:
    """The two clients of a plane with two value stores."""
    assert isinstance(plane.client, TwoNodes)
    return plane.client


def stored_by(plane: Plane) -> dict[str, int]:
    """Bytes in use of each value store."""
    return {
        store_id: store["used_bytes"] for store_id, store in plane.client.status()["values"].items()
    }


@pytest.mark.parametrize("size", [10, 300_000])
def test_puts_go_to_the_store_of_their_own_node(
    plane: Plane, nodes: TwoNodes, partition: str, size: int
) -> None:
    here = plane.core.joined.home
    assert here is not None
    nodes.here.kv_put("here", partition, {"x": torch.zeros(size)})
    used = stored_by(plane)
    assert len(used) == 2
    assert [store for store, nbytes in used.items() if nbytes] == [here]
    nodes.on_other_node("kv_put", "there", partition, {"x": torch.ones(size)})
    assert all(stored_by(plane).values())


@pytest.mark.parametrize("size", [10, 300_000])
def test_each_node_reads_what_either_wrote(
    plane: Plane, nodes: TwoNodes, partition: str, size: int
) -> None:
    for i in range(6):
        put = nodes.here.kv_put if i % 2 else nodes.there_put
        put(f"k{i}", partition, {"x": torch.full((size + i,), i), "y": torch.tensor(i)})
    keys = [f"k{i}" for i in (3, 0, 5, 4, 1, 2, 2)]
    want = [int(key[1]) for key in keys]
    rows = nodes.here.kv_batch_get(keys, partition, layout="packed")
    theirs = nodes.on_other_node("kv_batch_get", keys, partition, layout="packed")
    for got in (rows, theirs):
        assert got["y"].tolist() == want
        assert got.lengths["x"].tolist() == [size + i for i in want]
        joined = torch.cat([torch.full((size + i,), i) for i in want])
        assert torch.equal(got["x"], joined)


def test_fields_of_one_key_lie_on_two_nodes(nodes: TwoNodes, partition: str) -> None:
    nodes.here.kv_batch_put(["a", "b"], partition, {"x": torch.arange(6).view(2, 3)})
    nodes.there_put("a", partition, {"y": torch.arange(4)})
    nodes.there_put("b", partition, {"y": torch.arange(2)})
    nodes.there_put("a", partition, {"x": torch.tensor([7])})
    for client in (nodes.here.kv_batch_get, nodes.there_get):
        rows = client(["b", "a"], partition, layout="list")
        assert [row.tolist() for row in rows["x"]] == [[3, 4, 5], [7]]
        assert [row.tolist() for row in rows["y"]] == [[0, 1], [0, 1, 2, 3]]


def test_a_clear_frees_the_blocks_of_both_nodes(
    plane: Plane, nodes: TwoNodes, partition: str
) -> None:
    nodes.here.kv_put("a", partition, {"x": torch.zeros(100_000)})
    nodes.there_put("b", partition, {"x": torch.zeros(100_000)})
    assert all(stored_by(plane).values())
    assert nodes.on_other_node("kv_clear", ["a", "b"], partition) == 2
    plane.settle()
    assert not any(stored_by(plane).values())
    with pytest.raises(KeyNotFound):
        nodes.there_get(["a"], partition)


@pytest.mark.kinds("embedded-sync", "ray")
def test_the_spy_sees_the_segments_that_a_same_node_client_opens(
    plane: Plane, partition: str
) -> None:
    """Without this, a spy that sees nothing would prove nothing."""
    opened: list[str] = []
    with spying_on_segments(opened), plane.connect() as client:
        client.kv_put("k", partition, {"x": torch.zeros(100_000)})
        client.kv_batch_get(["k"], partition)
    assert [path for path in opened if client.plane_id in path]


def test_same_node_reads_on_other_nodes_rows_go_through_the_socket(
    plane_settings: dict[str, Any], ray_cluster: list[str]
) -> None:
    """The mixed case: what this node has is mapped, what the other has is asked for."""
    from tests.contract.planes import other_node

    with ray_hosted("mixed", plane_settings) as plane:
        there = other_node("mixed", plane.settings, ray_cluster[1])
        nodes = TwoNodes(plane.client, there)
        try:
            for i in range(4):
                nodes.kv_put(f"k{i}", "p", {"x": torch.full((70_000,), i)})
            keys = ["k3", "k0", "k2", "k1"]
            for rows in (
                nodes.here.kv_batch_get(keys, "p", layout="list"),
                nodes.there_get(keys, "p", layout="list"),
            ):
                assert [row[[0, -1]].tolist() for row in rows["x"]] == [[3, 3], [0, 0], [2, 2],
                                                                       [1, 1]]  # fmt: skip
            nodes.here.kv_clear(None, "p", where={})
        finally:
            nodes.leave()
