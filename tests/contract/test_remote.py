"""Two value stores on two nodes: what one writes the other reads, and nothing is mapped."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from dataplane.errors import KeyNotFound, QuotaExceeded
from tests.contract.planes import Plane, TwoNodes, ray_hosted, ray_remote, spying_on_segments

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


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "sent"])
def test_a_full_store_forwards_to_the_other_nodes(
    plane_settings: dict[str, Any], ray_cluster: list[str], mapped: bool
) -> None:
    """Rows of either way lie on the other node and are read from both, equal to what was put."""
    from tests.contract.planes import other_node

    segment = 4 << 20
    settings = {**plane_settings, "capacity_bytes": 2 * segment, "segment_bytes": segment}
    fills = {"x": torch.zeros(segment - 4096 - 64, dtype=torch.uint8)}
    small, large = torch.arange(500), torch.arange(100_000)
    with ExitStack() as stack:
        if mapped:
            plane = stack.enter_context(ray_hosted("forwards", settings))
            nodes = TwoNodes(plane.client, other_node("forwards", plane.settings, ray_cluster[1]))
            stack.callback(nodes.leave)
        else:
            plane = stack.enter_context(ray_remote("forwards", settings, ray_cluster[1]))
            nodes = plane.client
        here = plane.core.joined.home
        assert here is not None
        for key in ("0", "1"):
            nodes.here.kv_put(key, "full", fills)
        for i in range(2):
            nodes.here.kv_put(f"small{i}", "p", {"y": small + i})
            nodes.here.kv_put(f"large{i}", "p", {"y": large + i})
        used = stored_by(plane)
        there = next(store for store in used if store != here)
        assert used == {here: 2 * (segment - 4096), there: 2 * (1 + 196) * 4096}
        keys = ["large1", "small0", "large0", "small1"]
        for rows in (
            nodes.here.kv_batch_get(keys, "p", layout="list"),
            nodes.there_get(keys, "p", layout="list"),
        ):
            for got, want in zip(rows["y"], (large + 1, small, large, small + 1), strict=True):
                assert torch.equal(got, want)
        # Nowhere is room for a third: it waits, and the error is that of the own store.
        nodes.there_put("0", "more", fills)
        with pytest.raises(QuotaExceeded, match=f"{used[here]} of {2 * segment} bytes"):
            nodes.here.kv_put("2", "full", fills, timeout=2.0)
        for partition in ("full", "p", "more"):
            nodes.here.kv_clear(None, partition, where={})
        plane.settle()
        assert not any(stored_by(plane).values())
        nodes.here.kv_put("0", "full", fills)
        assert stored_by(plane)[there] == 0
        nodes.here.kv_clear(None, "full", where={})
