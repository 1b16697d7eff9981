"""Batches by key: which rows, with which tags, cut and joined."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.metadata import KVBatchMeta

from dataplane import compat


def meta(size: int = 3, start: int = 0, **others: Any) -> KVBatchMeta:
    places = range(start, start + size)
    settings: dict[str, Any] = {"partition_id": "p", "fields": ["x", "y"], **others}
    return KVBatchMeta([f"k{i}" for i in places], [{"i": i} for i in places], **settings)


def test_all_parts_have_defaults_and_can_be_set() -> None:
    empty = KVBatchMeta()
    assert (empty.keys, empty.tags, empty.partition_id, empty.fields) == ([], [], None, None)
    assert empty.extra_info == {}
    assert (empty.size, len(empty)) == (0, 0)
    assert not empty
    empty.keys, empty.tags, empty.fields = ["a"], [{}], ["x"]
    assert empty.size == len(empty) == 1
    assert empty == KVBatchMeta(["a"], [{}], None, ["x"])
    assert dataclasses.replace(empty, partition_id="q").partition_id == "q"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"keys": ["a", "b"], "tags": [{}]}, "keys and tags must have same length"),
        ({"keys": ["a", "b", "a"], "tags": [{}, {}, {}]}, r"duplicated keys: \['a'\]"),
        ({"keys": ["a"], "tags": [{}], "fields": ["x", "x"]}, r"duplicated fields: \['x'\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVBatchMeta(**parts)


def test_tags_and_extra_info_belong_to_one_batch_only() -> None:
    shared, deep, info = {"a": 1}, {"a": [1]}, {"a": [1]}
    made = KVBatchMeta(["k", "l", "m"], [shared, shared, deep], extra_info=info)
    made.tags[0]["a"] = 2
    made.tags[2]["a"].append(2)
    made.extra_info["a"].append(2)  # type: ignore[index]
    assert made.tags == [{"a": 2}, {"a": 1}, {"a": [1, 2]}]
    assert (shared, deep, info) == ({"a": 1}, {"a": [1]}, {"a": [1]})


@pytest.mark.parametrize(
    "derived",
    [
        lambda m: m.chunk(1)[0],
        lambda m: m.select_keys(m.keys),
        lambda m: KVBatchMeta.concat([m]),
    ],
    ids=["chunk", "select_keys", "concat"],
)
def test_a_change_of_a_derived_batch_is_none_of_its_source(derived: Any) -> None:
    source = meta(extra_info={"a": [1]})
    made = derived(source)
    assert made == source
    made.tags[0]["i"] = -1
    made.extra_info["a"].append(2)
    made.fields.append("z")
    made.keys.append("z")
    assert source == meta(extra_info={"a": [1]})


def test_of_makes_a_batch_of_these_very_parts() -> None:
    keys, tags, fields = ["a"], [{"x": [1]}], ["f"]
    made = KVBatchMeta.of(keys, tags, "p", fields)
    assert made == KVBatchMeta(keys, tags, "p", fields)
    assert made.keys is keys
    assert made.tags is tags
    assert made.fields is fields
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301


def test_a_selection_has_the_order_that_was_asked_for() -> None:
    chosen = meta(extra_info={"a": 1}).select_keys(["k2", "k0"])
    assert chosen == KVBatchMeta(["k2", "k0"], [{"i": 2}, {"i": 0}], "p", ["x", "y"], {"a": 1})
    assert meta().select_keys([]).size == 0
    with pytest.raises(ValueError, match=r"Contain duplicate keys: \['k0'\]"):
        meta().select_keys(["k0", "k0"])
    with pytest.raises(RuntimeError, match=r"\['nope'\] .* not found in current batch"):
        meta().select_keys(["k0", "nope"])


def test_reorder_moves_keys_and_tags_together_in_place() -> None:
    moved = meta()
    assert moved.reorder([2, 0, -2]) is None
    assert (moved.keys, moved.tags) == (["k2", "k0", "k1"], [{"i": 2}, {"i": 0}, {"i": 1}])


@pytest.mark.parametrize(
    ("indexes", "error"), [([0, 1], ValueError), ([0, 0, 1], ValueError), ([0, 1, 3], IndexError)]
)
def test_a_refused_reorder_has_moved_nothing(indexes: list[int], error: type[Exception]) -> None:
    kept = meta()
    with pytest.raises(error):
        kept.reorder(indexes)
    assert kept == meta()


def test_the_first_chunks_have_one_row_more(caplog: pytest.LogCaptureFixture) -> None:
    assert [part.keys for part in meta(4).chunk(3)] == [["k0", "k1"], ["k2"], ["k3"]]
    assert not caplog.records
    parts = meta(1).chunk(3)
    assert [part.size for part in parts] == [1, 0, 0]
    assert parts[2].partition_id == "p"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("chunks", [0, -1])
def test_a_batch_is_never_cut_into_no_chunks(chunks: int) -> None:
    with pytest.raises(ValueError, match="one chunk or more"):
        meta().chunk(chunks)


@given(st.integers(0, 20), st.integers(1, 9), st.sampled_from([None, {}, {"a": [1], "b": "x"}]))
def test_chunks_joined_are_the_batch(size: int, chunks: int, info: dict[str, Any] | None) -> None:
    whole = meta(size, extra_info=info)
    parts = whole.chunk(chunks)
    assert len(parts) == chunks
    sizes = [part.size for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    joined = KVBatchMeta.concat(parts)
    # An empty batch says nothing, and empty extra_info comes back as None: both as the peer does.
    assert joined == (meta(size, extra_info=info or None) if size else KVBatchMeta())


@given(st.permutations(range(6)))
def test_a_selection_is_what_reorder_makes(order: list[int]) -> None:
    moved = meta(6)
    moved.reorder(order)
    assert moved == meta(6).select_keys([f"k{place}" for place in order])


def test_concat_passes_over_batches_without_rows() -> None:
    odd = KVBatchMeta(partition_id="other", fields=["z"], extra_info={"a": 1})
    joined = KVBatchMeta.concat([odd, meta(2), odd, meta(1, 2)])
    assert joined == meta(3, extra_info=None)
    assert KVBatchMeta.concat([]) == KVBatchMeta.concat([KVBatchMeta(), odd]) == KVBatchMeta()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"partition_id": "q"}, "Partition do not match"),
        ({"partition_id": None}, "Partition do not match"),
        ({"fields": ["x"]}, "Field names do not match"),
        ({"start": 2}, "Got duplicated keys"),
        ({"extra_info": {"a": 2}}, "'a' has conflicting values in batches 0 and 1: 1 and 2"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVBatchMeta.concat(
            [meta(extra_info={"a": 1}), meta(**{"start": 3, "extra_info": {"a": 1}, **others})]
        )


def test_fields_are_the_first_batch_s_and_their_order_is_no_difference() -> None:
    joined = KVBatchMeta.concat([meta(1), meta(1, 1, fields=["y", "x"]), meta(1, 2, fields=None)])
    assert joined.fields == ["x", "y"]
    with pytest.raises(ValueError, match="Field names"):
        KVBatchMeta.concat([meta(1, fields=None), meta(1, 1)])


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        ([1, {"a": 2}], [1, {"a": 2}], True),
        ([1], [1, 2], False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1]), torch.tensor([1, 1]), False),
        ({"m": torch.tensor([1, 2])}, {"m": torch.tensor([1, 2])}, True),
        ({"m": torch.tensor([1, 2])}, {"n": torch.tensor([1, 2])}, False),
        (NAN, float("nan"), True),
    ],
)
def test_extra_info_meets_by_value(one: Any, other: Any, equal: bool) -> None:
    parts = [meta(1, extra_info={"v": one}), meta(1, 1, extra_info={"v": other, "more": 1})]
    if equal:
        joined = KVBatchMeta.concat(parts).extra_info
        assert joined is not None
        assert list(joined) == ["v", "more"]
        assert str(joined["v"]) == str(one)
    else:
        with pytest.raises(ValueError, match="conflicting"):
            KVBatchMeta.concat(parts)


def test_a_process_that_only_passes_a_batch_on_loads_neither_torch_nor_ray() -> None:
    code = (
        "import pickle, sys\n"
        "batch = pickle.loads(sys.stdin.buffer.read())\n"
        "from transfer_queue import KVBatchMeta\n"
        "whole = KVBatchMeta.concat(batch.chunk(2))\n"
        "assert type(batch) is KVBatchMeta and whole == batch\n"
        "heavy = {'torch', 'numpy', 'ray', 'tensordict'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = {"PYTHONPATH": compat.folder()}
    sent = pickle.dumps(meta(3, extra_info={"a": 1}))
    subprocess.run(
        [sys.executable, "-c", code], input=sent, env=os.environ | path, check=True, timeout=60
    )
