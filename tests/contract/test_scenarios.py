"""Scenarios 1 to 6 of the cases that break such systems, with their exact values."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client.effects import Ask
from dataplane.client.get import GetOptions, get_batch
from dataplane.client.put import put_batch
from dataplane.client.sync import Client
from dataplane.errors import FieldNotFound, KeyNotFound, SchemaMismatch, StaleWrite
from dataplane.wire.channel import Broken
from tests.contract.planes import MAPPED, Plane, embedded_sync

LARGE = 100_000
"""int64 entries of a row that is over the limit of small puts."""


def asks(effect: Any, *verbs: str) -> bool:
    return type(effect) is Ask and effect.verb in verbs


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# -- 1. clear against a late write, a reused slot and a reader -------------------------------


@MAPPED
def test_a_write_reserved_before_a_clear_is_stale_after_it(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("A", partition, {"x": ints(1, 2, 3)})
    removed: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            removed.append(plane.witness.kv_clear(["A"], partition))
            plane.witness.kv_put("B", partition, {"x": ints(9)})

    late = put_batch(
        plane.core, ["A"], partition, {"x": [torch.zeros(LARGE, dtype=torch.int64)]}, None, 0,
        deadline=plane.deadline(),
    )  # fmt: skip
    with pytest.raises(StaleWrite) as stale:
        plane.step(late, before=before)

    assert removed == [1]
    assert stale.value.keys == ["A"]
    assert stale.value.partition_id == partition
    assert_only_b_is_there(plane, client, partition)


def test_a_repeated_write_is_judged_from_what_its_client_had_seen_when_it_began(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("A", partition, {"x": ints(1, 2, 3)})
    client.kv_list(partition)  # a put of the other node has shown its client its revision only
    tries: list[str] = []

    def before(effect: Any) -> None:
        if asks(effect, "put_block"):
            tries.append(effect.verb)
            if len(tries) == 1:
                assert plane.witness.kv_clear(["A"], partition) == 1
                plane.witness.kv_put("B", partition, {"x": ints(9)})
                raise Broken("before a byte of it was sent")

    late = put_batch(
        plane.core, ["A"], partition, {"x": [ints(7)]}, None, 0, deadline=plane.deadline()
    )
    with pytest.raises(StaleWrite) as stale:
        plane.step(late, before=before)

    assert len(tries) == 2
    assert stale.value.keys == ["A"]
    assert_only_b_is_there(plane, client, partition)


def assert_only_b_is_there(plane: Plane, client: Any, partition: str) -> None:
    assert client.kv_list(partition).keys == ["B"]
    assert client.kv_batch_get(["B"], partition, layout="list")["x"][0].tolist() == [9]
    assert client.status()["bytes_in_use"] == 8
    plane.settle()
    assert plane.used_bytes() == 4096


@pytest.mark.parametrize("on_missing", ["raise", "drop"])
def test_a_reader_that_resolved_keys_cleared_meanwhile_names_or_drops_exactly_those(
    plane: Plane, client: Any, partition: str, on_missing: str
) -> None:
    keys = [f"k{i}" for i in range(8)]
    for i, key in enumerate(keys):
        client.kv_put(key, partition, {"x": ints(i, i)})
    order = [keys[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    cleared: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "pin", "read") and not cleared:
            cleared.append(plane.witness.kv_clear(["k3", "k5", "k1"], partition))
            plane.settle()

    read = get_batch(
        plane.core, order, partition, ["x"], GetOptions("list"), on_missing, plane.deadline()
    )
    if on_missing == "raise":
        with pytest.raises(KeyNotFound) as missing:
            plane.step(read, before=before)
        assert missing.value.keys == ["k5", "k3", "k1"]
        assert missing.value.partition_id == partition
    else:
        rows = plane.step(read, before=before)
        assert rows.keys == ["k2", "k7", "k0", "k6", "k4"]
        assert [row.tolist() for row in rows["x"]] == [[2, 2], [7, 7], [0, 0], [6, 6], [4, 4]]
    assert cleared == [3]


def interleave(writer: Client, clearer: Client, other: Client, partition: str, turns: int) -> None:
    """Clear A while one client writes it a second time and another writes B."""
    for turn in range(turns):
        writer.kv_put("A", partition, {"x": ints(1, 2, 3)})
        outcome: list[str] = []
        starts = threading.Barrier(3)

        def write_again(outcome: list[str] = outcome, starts: threading.Barrier = starts) -> None:
            starts.wait(10.0)
            try:
                writer.kv_put("A", partition, {"x": ints(7, 7, 7)})
                outcome.append("written")
            except StaleWrite:
                outcome.append("stale")

        def write_other(turn: int = turn, starts: threading.Barrier = starts) -> None:
            starts.wait(10.0)
            other.kv_put("B", partition, {"x": ints(9, turn)})

        threads = [threading.Thread(target=work) for work in (write_again, write_other)]
        for thread in threads:
            thread.start()
        starts.wait(10.0)
        removed = clearer.kv_clear(["A"], partition)
        for thread in threads:
            thread.join(30.0)
        assert removed == 1
        keys = clearer.kv_list(partition).keys
        values = clearer.kv_batch_get(keys, partition, ["x"], layout="list")["x"]
        found = {key: value.tolist() for key, value in zip(keys, values, strict=True)}
        assert found.pop("B") == [9, turn]
        # A write that began after the clear makes the key anew; nothing else brings it back.
        assert found in ({}, {"A": [7, 7, 7]} if outcome == ["written"] else {})
    clearer.kv_clear(["A", "B"], partition)
    assert clearer.status()["bytes_in_use"] == 0


def test_no_interleaving_of_clear_late_write_and_new_write_shows_a_wrong_value(
    plane: Plane, partition: str
) -> None:
    interleave(plane.client, plane.witness, plane.another(), partition, turns=40)


@pytest.mark.timeout(120)
def test_1000_interleavings_show_no_wrong_value_and_log_no_error(
    plane_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with embedded_sync("interleavings", plane_settings) as plane:
        interleave(plane.client, plane.witness, plane.another(), "p", turns=1000)
    assert "ERROR" not in capfd.readouterr().err


# -- 2. tags only, tag update, idempotent clear ----------------------------------------------


def test_a_key_lives_by_its_tags_alone_and_is_cleared_once(client: Any, partition: str) -> None:
    client.kv_put("k", partition, tags={"status": "pending"})
    listing = client.kv_list(partition)
    assert listing.keys == ["k"]
    assert listing.tags == [{"status": "pending"}]
    assert listing.fields == [()]
    with pytest.raises(FieldNotFound) as missing:
        client.kv_batch_get(["k"], partition, ["x"])
    assert (missing.value.keys, missing.value.fields) == (["k"], ["x"])

    client.kv_put("k", partition, {"x": ints(5, 6)})
    client.kv_put("k", partition, tags={"status": "done"})
    assert client.kv_batch_get(["k"], partition, layout="list")["x"][0].tolist() == [5, 6]
    assert client.kv_list(partition).tags == [{"status": "done"}]

    assert client.kv_clear(["k"], partition) == 1
    assert client.kv_clear(["k"], partition) == 0
    status = client.status()
    assert status["partitions"][partition]["keys"] == 0
    assert status["bytes_in_use"] == 0


# -- 3. equal lengths and a single row in a 2-D per-sample field -----------------------------


@pytest.mark.parametrize(
    ("lengths", "joined"), [([5, 5], (3, 10)), ([5], (3, 5)), ([5, 7], (3, 12))]
)
def test_rows_of_a_2d_field_are_ragged_in_the_last_dimension_whatever_their_lengths(
    client: Any, partition: str, lengths: list[int], joined: tuple[int, ...]
) -> None:
    rows = [torch.randn(3, length) for length in lengths]
    keys = [f"k{i}" for i in range(len(rows))]
    client.kv_batch_put(keys, partition, {"x": rows})

    packed = client.kv_batch_get(keys, partition, layout="packed")
    assert packed.lengths["x"].tolist() == lengths
    assert tuple(packed["x"].shape) == joined
    assert torch.equal(packed["x"], torch.cat(rows, 1))
    assert packed.cu_seqlens["x"].tolist() == [0, *np.cumsum(lengths)]

    nested = client.kv_batch_get(keys, partition)["x"]
    assert nested._ragged_idx == 2
    assert [tuple(row.shape) for row in nested.unbind()] == [(3, n) for n in lengths]
    for layout in ("nested", "list"):
        got = client.kv_batch_get(keys, partition, layout=layout)["x"]
        for row, put in zip(got.unbind() if layout == "nested" else got, rows, strict=True):
            assert torch.equal(row, put)


# -- 4. zero length --------------------------------------------------------------------------


def test_empty_rows_keep_their_place(client: Any, partition: str) -> None:
    rows = [ints(1, 2, 3), ints(), ints(4, 5)]
    client.kv_batch_put(["a", "b", "c"], partition, {"x": rows})
    nested = client.kv_batch_get(["a", "b", "c"], partition)
    assert nested["x"].offsets().tolist() == [0, 3, 3, 5]
    assert nested["x"].values().tolist() == [1, 2, 3, 4, 5]
    assert nested.lengths["x"].tolist() == [3, 0, 2]
    padded = client.kv_batch_get(["a", "b", "c"], partition, layout="padded", pad=-1)
    assert padded["x"].tolist() == [[1, 2, 3], [-1, -1, -1], [4, 5, -1]]
    assert padded.keys == ["a", "b", "c"]


def test_a_batch_of_empty_rows_is_a_batch(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": [ints(), ints()]})
    nested = client.kv_batch_get(["a", "b"], partition)["x"]
    assert nested.offsets().tolist() == [0, 0, 0]
    assert nested.dtype == torch.int64
    padded = client.kv_batch_get(["a", "b"], partition, layout="padded")["x"]
    assert (tuple(padded.shape), padded.dtype) == ((2, 0), torch.int64)


def test_an_empty_row_of_the_default_dtype_is_refused_among_integers(
    client: Any, partition: str
) -> None:
    with pytest.raises(SchemaMismatch) as within:
        client.kv_batch_put(["a", "b", "c"], partition, {"x": [ints(1), torch.tensor([]), ints(2)]})
    assert (within.value.keys, within.value.fields) == (["b"], ["x"])

    client.kv_put("a", partition, {"x": ints(1)})
    with pytest.raises(SchemaMismatch) as later:
        client.kv_put("b", partition, {"x": torch.tensor([])})
    assert (later.value.keys, later.value.fields) == (["b"], ["x"])
    assert "b" in str(later.value)
    assert "'x'" in str(later.value)
    assert client.kv_list(partition).keys == ["a"]


@pytest.mark.parametrize("layout", ["nested", "padded", "list", "packed"])
def test_an_empty_list_of_keys_gives_an_empty_result(
    client: Any, partition: str, layout: str
) -> None:
    client.kv_put("a", partition, {"x": ints(1), "r": torch.tensor(0.5), "s": "text"})
    rows = client.kv_batch_get([], partition, ["x", "r", "s"], layout=layout)
    assert rows.keys == []
    assert rows["s"] == []
    if layout == "list":
        assert (rows["x"], rows["r"]) == ([], [])
    else:
        assert (rows["x"].dtype, rows["r"].dtype) == (torch.int64, torch.float32)
        assert rows["r"].shape == (0,)
        assert rows["x"].numel() == 0


# -- 5. scalars ------------------------------------------------------------------------------


def test_scalar_rows_come_back_dense(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"reward": [torch.tensor(1.0), torch.tensor(0.5)]})
    dense = client.kv_batch_get(["a", "b"], partition)["reward"]
    assert (tuple(dense.shape), dense.tolist()) == ((2,), [1.0, 0.5])
    assert tuple(client.kv_batch_get(["b"], partition)["reward"].shape) == (1,)
    listed = client.kv_batch_get(["a", "b"], partition, layout="list")["reward"]
    assert [row.item() for row in listed] == [1.0, 0.5]
    assert [row.ndim for row in listed] == [0, 0]


def test_rows_of_one_entry_keep_their_dimension(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": ints(4, 5)[:, None]})
    padded = client.kv_batch_get(["a", "b"], partition, layout="padded")["x"]
    assert padded.tolist() == [[4], [5]]
    nested = client.kv_batch_get(["a", "b"], partition)["x"]
    assert nested.is_nested
    assert [row.tolist() for row in nested.unbind()] == [[4], [5]]
    client.kv_batch_put(["c", "d"], partition, {"x": [ints(1), ints(1, 2)]})
    ragged = client.kv_batch_get(["c", "d"], partition)["x"]
    assert [row.tolist() for row in ragged.unbind()] == [[1], [1, 2]]


def test_scalars_of_every_kind_are_tags(client: Any, partition: str) -> None:
    given = {
        "int": 3,
        "bool": True,
        "none": None,
        "numpy int": np.int64(3),
        "numpy float": np.float32(0.5),
        "numpy bool": np.bool_(False),
        "torch": torch.tensor(7),
        "list": [1, np.int16(2), [None, "x"]],
        "map": {"a": {"b": 1.5}},
    }
    client.kv_put("k", partition, tags=given)
    (tags,) = client.kv_list(partition).tags
    assert tags == {
        "int": 3, "bool": True, "none": None, "numpy int": 3, "numpy float": 0.5,
        "numpy bool": False, "torch": 7, "list": [1, 2, [None, "x"]], "map": {"a": {"b": 1.5}},
    }  # fmt: skip
    assert type(tags["bool"]) is bool
    assert type(tags["int"]) is type(tags["numpy int"]) is type(tags["torch"]) is int
    assert type(tags["numpy bool"]) is bool


# -- 6. bits, strides, aliasing --------------------------------------------------------------


def put_one(client: Any, partition: str, value: torch.Tensor) -> torch.Tensor:
    """The value after a way through the plane."""
    client.kv_put("k", partition, {"x": value})
    return client.kv_batch_get(["k"], partition, layout="list")["x"][0]


def test_bfloat16_keeps_24_bytes_and_every_bit(client: Any, partition: str) -> None:
    bits = torch.tensor([0x7FC1, 0xFFA5, 0x7F80, 0x8000, *range(8)], dtype=torch.int32)
    value = bits.to(torch.int16).view(torch.bfloat16).view(3, 4)  # NaN payloads, inf, -0
    got = put_one(client, partition, value)
    assert client.status()["bytes_in_use"] == 24
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), value.view(torch.int16))


def test_float8_one_is_byte_56(client: Any, partition: str) -> None:
    got = put_one(client, partition, torch.tensor([1.0]).to(torch.float8_e4m3fn))
    assert got.dtype == torch.float8_e4m3fn
    assert got.view(torch.uint8).tolist() == [56]


def test_bool_stays_bool(client: Any, partition: str) -> None:
    got = put_one(client, partition, torch.tensor([True, False]))
    assert (got.dtype, got.tolist()) == (torch.bool, [True, False])


def test_a_transposed_view_equals_its_contiguous_copy(client: Any, partition: str) -> None:
    value = torch.arange(6).view(3, 2).t()
    assert not value.is_contiguous()
    assert torch.equal(put_one(client, partition, value), value.contiguous())


def test_a_tensor_that_needs_grad_comes_back_detached(client: Any, partition: str) -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    got = put_one(client, partition, value)
    assert not got.requires_grad
    assert got.tolist() == [1.0, 2.0]
    assert value.requires_grad


def test_a_slice_stores_its_own_bytes_only(client: Any, partition: str) -> None:
    whole = torch.arange(1_000_000, dtype=torch.float32)
    got = put_one(client, partition, whole[500:510])
    assert client.status()["bytes_in_use"] == 40
    assert got.tolist() == [float(i) for i in range(500, 510)]


@pytest.mark.parametrize("size", [10, LARGE])
def test_source_and_result_share_nothing_with_the_store(
    client: Any, partition: str, size: int
) -> None:
    source = torch.arange(size)
    client.kv_put("k", partition, {"x": source})
    source.fill_(7)
    first = client.kv_batch_get(["k"], partition, layout="list")["x"][0]
    assert torch.equal(first, torch.arange(size))
    first.add_(1)
    again = client.kv_batch_get(["k"], partition, layout="list")["x"][0]
    assert torch.equal(again, torch.arange(size))


@pytest.mark.parametrize("layout", ["nested", "padded", "list", "packed"])
def test_repeated_keys_give_independent_rows(client: Any, partition: str, layout: str) -> None:
    client.kv_put("k", partition, {"x": ints(1, 2)})
    rows = client.kv_batch_get(["k", "k"], partition, layout=layout)
    assert rows.keys == ["k", "k"]
    data = rows["x"]
    if layout == "list":
        data[0][0] = 9
        assert [row.tolist() for row in data] == [[9, 2], [1, 2]]
    elif layout == "nested":
        data.values()[0] = 9
        assert [row.tolist() for row in data.unbind()] == [[9, 2], [1, 2]]
    else:
        data.view(-1)[0] = 9
        assert data.view(-1).tolist() == [9, 2, 1, 2]
