"""Faults of lengths, dtypes, shapes and containers, as reported on systems of this kind.

Each test is named after what is right; the source of the report stands beside it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane.errors import FieldNotFound, InvalidRequest, QuotaExceeded
from tests.contract.planes import Plane


def rows_of(container: Any) -> list[torch.Tensor]:
    """The rows of a nested or listed container."""
    return list(container.unbind()) if isinstance(container, torch.Tensor) else container


# -- D. lengths: zero, one, equal, huge ------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_position_ids_of_equal_lengths_are_ragged_in_their_tokens(
    client: Any, partition: str, count: int
) -> None:  # verl#7899
    rows = [torch.randint(0, 100, (3, 5)) for _ in range(count)]
    keys = [f"k{i}" for i in range(count)]
    client.kv_batch_put(keys, partition, {"position_ids": rows})
    got = client.kv_batch_get(keys, partition, layout="packed")
    assert got.lengths["position_ids"].tolist() == [5] * count
    assert tuple(got["position_ids"].shape) == (3, 5 * count)
    nested = client.kv_batch_get(keys, partition)["position_ids"]
    for row, put in zip(nested.unbind(), rows, strict=True):
        assert torch.equal(row, put)


def test_the_container_is_the_same_for_equal_and_unequal_rows(client: Any, partition: str) -> None:
    # TQ#92
    client.kv_batch_put(["a", "b"], partition, {"x": torch.ones(2, 4)})
    client.kv_batch_put(["c", "d"], partition, {"x": [torch.ones(2), torch.ones(6)]})
    equal = client.kv_batch_get(["a", "b"], partition)["x"]
    unequal = client.kv_batch_get(["c", "d"], partition)["x"]
    one = client.kv_batch_get(["c"], partition)["x"]
    for container in (equal, unequal, one):
        assert container.is_nested
        assert container.layout is torch.jagged
        assert container.ndim == 2


def test_padding_is_as_wide_as_the_longest_row_and_no_wider(client: Any, partition: str) -> None:
    # pt#159380
    client.kv_batch_put(["a", "b"], partition, {"x": [torch.ones(1), torch.ones(3)]})
    padded = client.kv_batch_get(["a", "b"], partition, layout="padded")["x"]
    assert padded.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    nested = client.kv_batch_get(["a", "b"], partition)["x"]
    assert tuple(torch.nested.to_padded_tensor(nested, 0.0).shape) == (2, 3)


def test_rows_are_selected_by_our_own_lists_of_keys(client: Any, partition: str) -> None:
    # pt#157404
    rows = [torch.arange(n) for n in (2, 5, 3)]
    meta = client.kv_batch_put(["a", "b", "c"], partition, {"x": rows})
    some = meta.select(["a", "c"])
    got = client.kv_batch_get(some.keys, some.partition_id, some.fields)["x"]
    assert [row.tolist() for row in got.unbind()] == [[0, 1], [0, 1, 2]]
    back = meta.reorder([2, 1, 0])
    got = client.kv_batch_get(back.keys, back.partition_id)["x"]
    assert [len(row) for row in got.unbind()] == [3, 5, 2]
    parts = [client.kv_batch_get(p.keys, partition)["x"] for p in meta.chunk(2)]
    assert [[len(row) for row in part.unbind()] for part in parts] == [[2, 5], [3]]


# -- E. dtype, shape, containers, serialisation ----------------------------------------------


def test_a_row_of_one_entry_stays_a_row_among_longer_ones(client: Any, partition: str) -> None:
    # Relax#286
    client.kv_batch_put(
        ["a", "b"], partition,
        {"tensors": [torch.tensor([1]), torch.tensor([1, 2])], "lists": [[1], [1, 2]]},
    )  # fmt: skip
    got = client.kv_batch_get(["a", "b"], partition)
    assert [row.tolist() for row in got["tensors"].unbind()] == [[1], [1, 2]]
    assert got["lists"] == [[1], [1, 2]]


def test_rows_that_differ_in_their_first_dimension_are_encoded_row_by_row(
    client: Any, partition: str
) -> None:  # TQ-old#121
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    strided = torch.nested.nested_tensor(rows)
    assert strided.layout is torch.strided
    client.kv_batch_put(["a", "b"], partition, {"x": strided})
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    client.kv_batch_put(["c", "d"], partition, {"x": jagged})
    for layout in ("nested", "list"):
        got = client.kv_batch_get(["b", "a", "d", "c"], partition, layout=layout)
        assert got.lengths["x"].tolist() == [4, 2, 4, 2]
        for row, put in zip(rows_of(got["x"]), [*rows[::-1], *rows[::-1]], strict=True):
            assert torch.equal(row, put)
    packed = client.kv_batch_get(["a", "b"], partition, layout="packed")["x"]
    assert torch.equal(packed, torch.cat(rows))


@pytest.mark.parametrize("texts", [["q", "q"], ["q"], ["", "q", "q"]])
def test_equal_strings_are_a_list_of_all_of_them(
    client: Any, partition: str, texts: list[str]
) -> None:  # td#831
    keys = [f"k{i}" for i in range(len(texts))]
    forms: dict[str, Any] = {
        "list": {"x": texts},
        "stack": TensorDict({"x": NonTensorStack(*texts)}, batch_size=[len(texts)]),
        "rows": [{"x": text} for text in texts],
    }
    for name, fields in forms.items():
        client.kv_batch_put(keys, f"{partition}-{name}", fields)
        rows = client.kv_batch_get(keys, f"{partition}-{name}")
        assert rows["x"] == texts
        as_td = rows.to_tensordict()
        assert as_td["x"] == texts or as_td.get("x").tolist() == texts
        assert as_td.batch_size == torch.Size([len(texts)])


class Custom:
    """An object of the caller's own making."""

    def __init__(self) -> None:
        self.flag = True


@pytest.mark.parametrize(
    "value",
    [Custom(), {1, 2}, object, lambda: None, bytearray(b"x"), [1, {"deep": Custom()}]],
    ids=["instance", "set", "class", "function", "bytearray", "nested instance"],
)
def test_what_would_not_come_back_equal_is_refused(
    plane: Plane, partition: str, value: Any
) -> None:  # NeMo#3921
    with pytest.raises(InvalidRequest, match="'odd' of key 'k1'"):
        plane.witness.kv_batch_put(["k0", "k1"], partition, {"odd": [1, value]})
    with pytest.raises(InvalidRequest, match="'odd' of key 'k1'"):
        plane.witness.kv_put("k1", partition, {"odd": value})
    assert partition not in plane.witness.status()["partitions"]


def test_a_field_that_some_keys_lack_never_shifts_against_the_rows(
    client: Any, partition: str
) -> None:  # trl#6002
    image = {"pixels": torch.arange(6).view(2, 3).float(), "grid": [1, 2, 3]}
    client.kv_put("1", partition, {"x": torch.tensor([1]), "img": image})
    client.kv_put("2", partition, {"x": torch.tensor([2])})
    client.kv_put("3", partition, {"x": torch.tensor([3]), "img": image})
    with pytest.raises(FieldNotFound) as missing:
        client.kv_batch_get(["1", "2", "3"], partition, ["img"])
    assert (missing.value.keys, missing.value.fields) == (["2"], ["img"])
    rows = client.kv_batch_get(["1", "2", "3"], partition, on_missing="drop")
    assert rows.keys == ["1", "3"]
    assert [row.tolist() for row in rows["x"].unbind()] == [[1], [3]]
    assert len(rows["img"]) == 2
    assert client.kv_list(partition).fields == [("img", "x"), ("x",), ("img", "x")]


def test_rows_over_the_stores_size_are_refused_before_anything_is_written(
    plane: Plane, client: Any, partition: str
) -> None:  # msgpack#181, dask#527
    # 4 GiB and one byte, which no page of this machine has to hold: one element, expanded.
    huge = torch.zeros(1, dtype=torch.uint8).expand((4 << 30) + 1)
    # Sent through a socket, rows are first made contiguous: there 320 MB will do.
    row = (512 << 20) + 1 if plane.maps_segments else 40 << 20
    many = torch.zeros(1, 1, dtype=torch.uint8).expand(8, row)
    with pytest.raises(InvalidRequest, match="'x' of key 'k'"):
        plane.witness.kv_put("k", partition, {"x": huge})
    with pytest.raises(QuotaExceeded) as quota:
        plane.witness.kv_batch_put([f"k{i}" for i in range(8)], partition, {"x": many})
    assert quota.value.limit_bytes == 256 << 20
    assert partition not in client.status()["partitions"]
    client.kv_put("k", partition, {"x": torch.tensor([1])})


def test_a_megabyte_of_text_counts_as_a_megabyte(client: Any, partition: str) -> None:
    # TQ#83
    client.kv_put("k", partition, {"text": "x" * 1_000_000})
    size = client.status()["partitions"][partition]["payload_bytes"]
    assert 1_000_000 <= size <= 1_000_010
