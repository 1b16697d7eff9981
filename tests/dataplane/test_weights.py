"""Weights on the plane: versions are whole or not there, and read in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import (
    AlreadyWritten,
    Client,
    InvalidRequest,
    WeightsNotFound,
    newest_version,
    publish_weights,
    read_weights,
)
from dataplane import weights as module

MIXED = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.bias": torch.arange(3, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "nothing": torch.zeros(0, 5),
}


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(plane_settings, name="weights")
    yield client
    client.close(destroy=True)


@pytest.fixture
def client(plane: Client) -> Iterator[Client]:
    yield plane
    for name in plane.kv_list_partitions():
        plane.kv_drop_partition(name)


class Tied(torch.nn.Module):
    """The smallest model whose first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def versions(client: Client, prefix: str = "weights") -> list[str]:
    return sorted(name for name in client.kv_list_partitions() if name.startswith(f"{prefix}@"))


def assert_same(tensors: Any, expected: Any) -> None:
    assert list(tensors) == list(expected) or set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


def test_what_is_published_is_what_is_read_in_every_dtype_and_shape(client: Client) -> None:
    size = publish_weights(client, MIXED, 17)
    assert size == 12 * 4 + 3 * 2 + 8
    with read_weights(client) as found:
        assert found.version == 17
        assert_same(found.tensors, MIXED)
    assert versions(client) == ["weights@17"]
    assert client.kv_list("weights@17", where={"version": 17}).keys == ["@manifest"]


def test_weights_are_read_in_place(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_weights(client, MIXED, 1)
    asked: list[list[str]] = []
    get = Client.kv_batch_get

    def watched(self: Client, keys: list[str], *args: Any, **options: Any) -> Any:
        asked.append(keys)
        return get(self, keys, *args, **options)

    monkeypatch.setattr(Client, "kv_batch_get", watched)
    with read_weights(client) as found:
        assert_same(found.tensors, MIXED)
    assert asked == [["@manifest"]]


def test_where_no_view_can_be_had_weights_are_copied(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_weights(client, MIXED, 1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidRequest("some of these rows lie on another node")

    monkeypatch.setattr(Client, "kv_view", refuse)
    with read_weights(client, 1) as found:
        assert_same(found.tensors, MIXED)


@pytest.mark.parametrize("form", ["module", "state_dict"])
def test_a_tied_parameter_is_written_once_and_read_under_both_names(
    client: Client, form: str
) -> None:
    model = Tied()
    publish_weights(client, model if form == "module" else model.state_dict(), 3)
    keys = client.kv_list("weights@3").keys
    assert sorted(keys) == ["@manifest", "embed.weight", "middle.bias", "middle.weight"]
    with read_weights(client, 3) as found:
        assert_same(found.tensors, dict(model.state_dict()))
        pair = [found.tensors[name].data_ptr() for name in ("head.weight", "embed.weight")]
        assert pair[0] == pair[1]


def test_views_of_one_tensor_are_written_each(client: Client) -> None:
    flat = torch.arange(10.0)
    parts = {"first": flat[:4], "second": flat[4:].view(2, 3), "turned": flat[4:].view(2, 3).T}
    publish_weights(client, parts, 1)
    with read_weights(client) as found:
        assert_same(found.tensors, parts)


def test_floating_point_weights_are_converted_when_asked(client: Client) -> None:
    publish_weights(client, MIXED, 1, dtype=torch.bfloat16)
    with read_weights(client) as found:
        assert found.tensors["a.weight"].dtype == torch.bfloat16
        assert found.tensors["steps"].dtype == torch.int64
        assert torch.equal(found.tensors["a.weight"], MIXED["a.weight"].bfloat16())


def test_large_models_are_written_in_several_puts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUT_BYTES", 100)
    model = {f"w{i}": torch.full((i * 7 + 1,), float(i)) for i in range(12)}
    publish_weights(client, model, 1)
    with read_weights(client) as found:
        assert_same(found.tensors, model)


# -- versions --------------------------------------------------------------------------------


def test_only_the_newest_versions_are_kept(client: Client) -> None:
    for version in (1, 2, 10, 9 + 2):
        publish_weights(client, {"w": torch.tensor([float(version)])}, version, keep=2)
    assert versions(client) == ["weights@10", "weights@11"]
    assert newest_version(client) == 11
    with read_weights(client) as found:
        assert found.tensors["w"].tolist() == [11.0]
    with (
        pytest.raises(WeightsNotFound, match=r"no version 2; it has \[10, 11\]"),
        read_weights(client, 2),
    ):
        pass


def test_a_view_of_a_version_that_is_dropped_stays_readable(client: Client) -> None:
    publish_weights(client, MIXED, 1, keep=1)
    with read_weights(client) as found:
        publish_weights(client, {"w": torch.zeros(1)}, 2, keep=1)
        assert versions(client) == ["weights@2"]
        assert_same(found.tensors, MIXED)


def test_families_do_not_meet(client: Client) -> None:
    publish_weights(client, {"w": torch.zeros(1)}, 5, prefix="critic")
    publish_weights(client, {"w": torch.ones(1)}, 3)
    assert newest_version(client) == 3
    assert newest_version(client, prefix="critic") == 5


def test_nothing_published_is_said(client: Client) -> None:
    assert newest_version(client) is None
    said = pytest.raises(WeightsNotFound, match="no version of 'weights' has been published")
    with said, read_weights(client):
        pass


def test_a_version_is_written_once_unless_the_run_went_back(client: Client) -> None:
    for version in (4, 5, 6):
        publish_weights(client, {"w": torch.tensor([float(version)])}, version, keep=3)
    for old in (5, 6):
        with pytest.raises(AlreadyWritten, match="has version 6 already"):
            publish_weights(client, {"w": torch.zeros(1)}, old)
    assert newest_version(client) == 6
    publish_weights(client, {"w": torch.tensor([50.0])}, 5, keep=3, replace=True)
    assert versions(client) == ["weights@4", "weights@5"]
    with read_weights(client) as found:
        assert (found.version, found.tensors["w"].tolist()) == (5, [50.0])


def test_what_a_publisher_that_died_has_left_is_read_by_nobody_and_goes(client: Client) -> None:
    publish_weights(client, {"w": torch.zeros(1)}, 1)
    for version in (2, 3):
        client.kv_put("w", f"weights@{version}", {"float32": torch.ones(9)})
    assert newest_version(client) == 1
    with pytest.raises(WeightsNotFound, match="weights@3 is not whole"), read_weights(client, 3):
        pass
    publish_weights(client, {"w": torch.full((2,), 3.0)}, 3)
    with read_weights(client) as found:
        assert found.tensors["w"].tolist() == [3.0, 3.0]
    assert versions(client) == ["weights@1", "weights@2", "weights@3"]
    publish_weights(client, {"w": torch.zeros(1)}, 4)
    assert versions(client) == ["weights@3", "weights@4"]


def test_a_publication_that_fails_leaves_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_weights(client, {"w": torch.zeros(1)}, 1)
    put = Client.kv_put

    def fail(self: Client, key: str, *args: Any, **options: Any) -> Any:
        if key == module.MANIFEST:
            raise InvalidRequest("no manifest today")
        return put(self, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "kv_put", fail)
        with pytest.raises(InvalidRequest, match="no manifest today"):
            publish_weights(client, MIXED, 2)
    assert versions(client) == ["weights@1"]


@pytest.mark.parametrize("damage", ["key", "length"])
def test_a_version_that_lost_a_row_is_refused(client: Client, damage: str) -> None:
    publish_weights(client, MIXED, 1)
    if damage == "key":
        client.kv_clear(["a.bias"], "weights@1")
    else:
        client.kv_put("a.bias", "weights@1", {"bfloat16": torch.zeros(2, dtype=torch.bfloat16)})
    said = pytest.raises(WeightsNotFound, match=r"weights@1 is not whole: .*a\.bias")
    with said, read_weights(client):
        pass


def test_the_newest_is_looked_for_again_when_it_is_dropped_meanwhile(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_weights(client, {"w": torch.ones(1)}, 1, keep=1)
    newest = module.newest_version

    def slow(*args: Any, **options: Any) -> int | None:
        found = newest(*args, **options)
        monkeypatch.undo()
        publish_weights(client, {"w": torch.full((1,), 2.0)}, 2, keep=1)
        return found

    monkeypatch.setattr(module, "newest_version", slow)
    with read_weights(client) as found:
        assert (found.version, found.tensors["w"].tolist()) == (2, [2.0])


@pytest.mark.parametrize("wrong", [{}, {"w": 3}, {"@manifest": torch.zeros(1)}])
def test_what_is_no_weight_is_refused(client: Client, wrong: Any) -> None:
    with pytest.raises(InvalidRequest):
        publish_weights(client, wrong, 1)
    assert versions(client) == []
