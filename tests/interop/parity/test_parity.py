"""TransferQueue 0.1.11 and the drop-in answer alike, but for what the table of differences says."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import Any

import pytest

from tests.interop.parity.cases import Raised, load
from tests.interop.parity.compare import broken, differences, unlike
from tests.interop.parity.describe import describe
from tests.interop.parity.differences import DIFFERENCES
from tests.interop.parity.side import PEER_VERSION, answers

ENOUGH = 15
CATEGORIES = ("tags", "fields", "shapes", "errors", "KVBatchMeta", "BatchMeta", "client")


def test_every_category_has_enough_cases() -> None:
    counts = Counter(case.category for case in load().values())
    assert {name: counts[name] for name in CATEGORIES if counts[name] < ENOUGH} == {}
    assert counts["vectors"] >= 10


def test_the_table_names_cases_that_there_are() -> None:
    assert set(DIFFERENCES) <= set(load())
    assert all(reason.strip() for reason in DIFFERENCES.values())


@pytest.mark.parametrize(
    ("peer", "dropin"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), ("1", 1), (None, False), ([1, 2], [2, 1]), ([1], [1, 1]),
        ({"a": 1}, {"a": 1, "b": 2}), ((1,), [1]), ([], None), (Raised(KeyError()), 1),
        (Raised(KeyError()), Raised(ValueError())), (Raised(KeyError()), Raised(LookupError())),
    ],
)  # fmt: skip
def test_a_difference_is_seen(peer: Any, dropin: Any) -> None:
    assert unlike(describe(peer), describe(dropin))


def test_containers_of_equal_values_are_unlike() -> None:
    import torch

    rows = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    containers = [
        torch.stack(rows), torch.nested.nested_tensor(rows, layout=torch.jagged), rows,
        torch.nested.nested_tensor(rows), torch.stack(rows).float(),
        torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 1).int(),
    ]  # fmt: skip
    described = [describe(container) for container in containers]
    for i, one in enumerate(described):
        assert [bool(unlike(one, other)) for other in described] == [
            i != j for j in range(len(described))
        ]


def test_an_error_of_a_subclass_is_alike() -> None:
    class Missing(KeyError):
        pass

    assert unlike(describe(Raised(LookupError())), describe(Raised(Missing()))) == []


def _installed() -> str | None:
    try:
        return metadata.version("TransferQueue")
    except metadata.PackageNotFoundError:
        return None


needs_peer = pytest.mark.skipif(
    _installed() != PEER_VERSION, reason=f"needs TransferQueue {PEER_VERSION} (extra `bench`)"
)


@pytest.fixture(scope="module")
def sides(ray_cluster: list[str]) -> dict[str, dict[str, Any]]:
    """Every case's answer from each side, each from a process of its own."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return {side: answers(side, address) for side in ("peer", "dropin")}


@needs_peer
@pytest.mark.transferqueue
@pytest.mark.ray
@pytest.mark.slow
def test_cases_run_on_the_peer(sides: dict[str, dict[str, Any]]) -> None:
    assert set(sides["peer"]) == set(load())
    assert broken(sides["peer"]) == {}


@needs_peer
@pytest.mark.transferqueue
@pytest.mark.ray
@pytest.mark.slow
def test_all_that_differs_is_in_the_table(sides: dict[str, dict[str, Any]]) -> None:
    found = differences(sides["peer"], sides["dropin"])
    unexpected = {name: lines for name, lines in found.items() if name not in DIFFERENCES}
    assert unexpected == {}
    assert sorted(set(DIFFERENCES) - set(found)) == [], "in the table, but alike"
