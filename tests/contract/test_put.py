"""Puts: forms of input, merging, options, limits, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from dataplane.errors import InvalidRequest, KeyNotFound, SchemaMismatch
from tests.contract.planes import Plane, embedded_sync

KEYS = ["a", "b", "c"]


def ragged() -> list[torch.Tensor]:
    return [torch.arange(n) for n in (2, 0, 3)]


FORMS: dict[str, Any] = {
    "columns of lists": lambda: {"x": ragged(), "r": [1.0, 2.0, 3.0], "s": ["p", "q", "q"]},
    "columns of tensors": lambda: {
        "x": torch.nested.nested_tensor(ragged(), layout=torch.jagged),
        "r": [1.0, 2.0, 3.0],
        "s": np.array(["p", "q", "q"]),
    },
    "rows": lambda: [
        {"x": x, "r": r, "s": s} for x, r, s in zip(ragged(), (1.0, 2.0, 3.0), "pqq", strict=True)
    ],
    "TensorDict": lambda: TensorDict(
        {
            "x": torch.nested.nested_tensor(ragged(), layout=torch.jagged),
            "r": NonTensorStack(1.0, 2.0, 3.0),
            "s": NonTensorStack("p", "q", "q"),
        },
        batch_size=[3],
    ),
    "lazy stack": lambda: lazy_stack(
        [
            TensorDict({"x": x, "r": NonTensorData(r), "s": NonTensorData(s)}, [])
            for x, r, s in zip(ragged(), (1.0, 2.0, 3.0), "pqq", strict=True)
        ]
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_the_same_rows(client: Any, partition: str, form: str) -> None:
    meta = client.kv_batch_put(KEYS, partition, FORMS[form]())
    assert meta.keys == KEYS
    assert meta.fields == ["r", "s", "x"]
    assert meta.tags == [{}, {}, {}]
    rows = client.kv_batch_get(KEYS, partition, layout="list")
    assert [row.tolist() for row in rows["x"]] == [[0, 1], [], [0, 1, 2]]
    assert rows["s"] == ["p", "q", "q"]
    assert rows["r"] == [1.0, 2.0, 3.0]
    assert client.kv_list(partition).lengths("x").tolist() == [2, 0, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"x": torch.arange(3), "r": torch.tensor(0.5), "o": {"a": 1}},
        TensorDict({"x": torch.arange(3), "r": torch.tensor(0.5), "o": NonTensorData({"a": 1})}),
    ],
    ids=["mapping", "TensorDict"],
)
def test_one_row_is_put_as_a_mapping_or_a_tensordict(
    client: Any, partition: str, fields: Any
) -> None:
    meta = client.kv_put("k", partition, fields, {"n": np.int64(1)})
    assert (meta.keys, meta.fields, meta.tags) == (["k"], ["o", "r", "x"], [{"n": 1}])
    rows = client.kv_batch_get(["k"], partition)
    assert rows["x"].values().tolist() == [0, 1, 2]
    assert rows["r"].tolist() == [0.5]
    assert rows["o"] == [{"a": 1}]


def test_tags_merge_into_those_that_are_there(client: Any, partition: str) -> None:
    client.kv_put("k", partition, tags={"a": 1, "b": {"deep": 1}})
    meta = client.kv_put("k", partition, tags={"b": {"other": 2}, "c": None}, return_tags=True)
    merged = {"a": 1, "b": {"other": 2}, "c": None}
    assert meta.tags == [merged]
    assert client.kv_list(partition).tags == [merged]


def test_return_tags_brings_the_merged_tags_and_the_fields_that_all_keys_have(
    client: Any, partition: str
) -> None:
    client.kv_put("a", partition, {"x": torch.arange(1), "y": torch.arange(1)}, {"n": 1})
    client.kv_put("b", partition, {"x": torch.arange(1)}, {"n": 2})
    sent = client.kv_batch_put(["a", "b"], partition, {"z": torch.arange(2)}, [{"m": 1}, {"m": 2}])
    assert (sent.tags, sent.fields) == ([{"m": 1}, {"m": 2}], ["z"])
    merged = client.kv_batch_put(
        ["b", "a"], partition, None, [{"k": 0}, {"k": 0}], return_tags=True
    )
    assert merged.tags == [{"n": 2, "m": 2, "k": 0}, {"n": 1, "m": 1, "k": 0}]
    assert merged.fields == ["x", "z"]
    client.kv_clear(["b"], partition)
    again = client.kv_batch_put(["b", "a"], partition, None, [{"n": 5}, {}], return_tags=True)
    assert again.tags == [{"n": 5}, {"n": 1, "m": 1, "k": 0}]
    assert again.fields == []
    new = client.kv_batch_put(
        ["c", "d"],
        partition,
        {"w": torch.arange(2)},
        [{"n": np.int64(3), "l": [1]}, {}],
        return_tags=True,
    )
    assert (new.tags, new.fields) == ([{"n": 3, "l": [1]}, {}], ["w"])
    assert type(new.tags[0]["n"]) is int, "what comes back is what a listing brings"
    with_values = client.kv_put("a", partition, {"y": torch.arange(2)}, return_tags=True)
    assert with_values.tags == [{"n": 1, "m": 1, "k": 0}]
    assert with_values.fields == ["x", "y", "z"]


def test_merged_tags_that_no_answer_could_hold_are_refused_before_the_put(
    plane_settings: dict[str, Any],
) -> None:
    with embedded_sync("large-tags", plane_settings) as plane:
        client = plane.client
        keys = [f"k{i}" for i in range(1200)]
        for part in (keys[:600], keys[600:]):
            client.kv_batch_put(part, "p", None, [{"large": "x" * 60_000}] * 600)
        revision = client.kv_list("p", limit=1).revision
        with pytest.raises(InvalidRequest, match="1200 keys"):
            client.kv_batch_put(keys, "p", None, [{"n": 1}] * 1200, return_tags=True)
        assert client.kv_list("p", limit=1).revision == revision
        few = client.kv_batch_put(keys[:600], "p", None, [{"n": 1}] * 600, return_tags=True)
        assert few.tags == [{"large": "x" * 60_000, "n": 1}] * 600
        client.kv_clear(None, "p", where={})


def test_fields_are_overwritten_one_by_one(client: Any, partition: str) -> None:
    client.kv_batch_put(
        ["a", "b"], partition, {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}, [{"t": 1}] * 2
    )
    client.kv_put("a", partition, {"y": torch.ones(5)})
    rows = client.kv_batch_get(["a", "b"], partition, layout="list")
    assert [row.tolist() for row in rows["x"]] == [[0.0] * 3, [0.0] * 3]
    assert [row.tolist() for row in rows["y"]] == [[1.0] * 5, [0.0] * 3]
    assert client.kv_list(partition).tags == [{"t": 1}] * 2


def test_fields_of_one_key_come_from_different_puts_and_clients(
    plane: Plane, client: Any, partition: str
) -> None:
    other = plane.another()
    keys = [f"k{i}" for i in range(9)]
    client.kv_batch_put(keys, partition, {"x": torch.arange(9)})
    other.kv_batch_put(keys[::2], partition, {"y": torch.arange(5)}, must_exist=True)
    other.kv_batch_put(keys[1::2], partition, {"y": torch.arange(4) + 10}, must_exist=True)
    client.kv_batch_put(keys[:3], partition, {"x": torch.arange(3) + 100})
    rows = client.kv_batch_get(keys[::-1], partition, ["y", "x"])
    assert rows["x"].tolist() == [8, 7, 6, 5, 4, 3, 102, 101, 100]
    assert rows["y"].tolist() == [4, 13, 3, 12, 2, 11, 1, 10, 0]


def test_a_put_without_fields_needs_tags(client: Any, partition: str) -> None:
    with pytest.raises(InvalidRequest, match="fields, tags or both"):
        client.kv_put("k", partition)
    with pytest.raises(InvalidRequest, match="fields, tags or both"):
        client.kv_batch_put(["k"], partition)
    meta = client.kv_put("k", partition, {})  # no field is a row without fields
    assert (meta.keys, meta.fields) == (["k"], [])
    assert client.kv_list(partition).keys == ["k"]


def test_revisions_rise_and_say_which_put_came_last(client: Any, partition: str) -> None:
    metas = [client.kv_put(f"k{i % 2}", partition, tags={"i": i}) for i in range(4)]
    revisions = [meta.revision for meta in metas]
    assert revisions == sorted(set(revisions))
    assert client.kv_list(partition).revision == revisions[-1]


WRONG: dict[str, tuple[Any, str]] = {
    "fewer rows than keys": ({"x": torch.zeros(2, 3)}, "'x' has 2 rows for 3 keys"),
    "a shorter list": ({"x": [1, 2]}, "'x' has 2 rows for 3 keys"),
    "a scalar column": ({"x": torch.tensor(1.0)}, "'x'"),
    "a string column": ({"x": "abc"}, "'x'"),
    "rows of different fields": ([{"x": 1}, {"x": 1, "y": 2}, {"x": 1}], "'a' lacks 'y'"),
    "fewer row mappings": ([{"x": 1}], "3 keys, but fields for 1 rows"),
    "a row that is no mapping": ([{"x": 1}, 5, {"x": 1}], "key 'b'"),
    "another batch size": (TensorDict({"x": torch.zeros(2)}, [2]), r"batch size \[2\] for 3 keys"),
    "a nested TensorDict": (TensorDict({"x": TensorDict({}, [3])}, [3]), "'x'"),
    "an empty name": ({"": torch.zeros(3)}, "name of a field"),
    "a name that is no string": ({1: torch.zeros(3)}, "name of a field"),
    "a long name": ({"n" * 2000: torch.zeros(3)}, "name of a field"),
    "no mapping at all": (5, "int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fields_of_a_wrong_form_are_refused_naming_them(
    plane: Plane, partition: str, case: str
) -> None:
    fields, words = WRONG[case]
    with pytest.raises(InvalidRequest, match=words):
        plane.witness.kv_batch_put(KEYS, partition, fields)
    assert partition not in plane.witness.status()["partitions"]


WRONG_KEYS: dict[str, tuple[Any, str]] = {
    "a lone string": ("abc", r"\['abc'\]"),
    "a number": ([1, "b"], "int"),
    "bytes": ([b"a"], "bytes"),
    "not a list": (5, "list"),
    "twice the same": (["a", "b", "a"], "repeated: 'a'"),
    "empty": (["a", ""], "empty"),
    "too long": (["a", "k" * 1025], "1025 bytes"),
    "a NUL": (["a", "b\0c"], "control"),
    "an escape": (["\x1b[31m"], "control"),
    "a newline": (["a\nb"], "control"),
    "out of the folder": (["../../etc/passwd"], r"'\.\.'"),
    "half a character": (["\ud800"], "Unicode"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_keys_that_will_not_do_are_named(plane: Plane, partition: str, case: str) -> None:
    keys, words = WRONG_KEYS[case]
    client = plane.witness
    count = len(keys) if isinstance(keys, list) else 1
    with pytest.raises(InvalidRequest, match=words):
        client.kv_batch_put(keys, partition, None, [{}] * count)
    assert partition not in client.status()["partitions"]


@pytest.mark.parametrize("name", ["", "a\0b", "../x", "p" * 1025, 5, None])
def test_partition_names_that_will_not_do_are_refused(client: Any, name: Any) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_put("k", name, tags={})
    with pytest.raises(InvalidRequest):
        client.kv_list(name)


@pytest.mark.parametrize(
    "key", ["k", "ключ", "日本語", "a/b/c", "a..b", "k" * 1024, "🂡", "uid_0_1", " spaced "]
)
def test_any_other_text_is_a_key(client: Any, partition: str, key: str) -> None:
    client.kv_put(key, partition, {"x": torch.arange(2)}, {"n": 1})
    assert client.kv_list(partition).keys == [key]
    assert client.kv_batch_get([key, key], partition).keys == [key, key]
    assert client.kv_clear([key], partition) == 1


WRONG_TAGS: dict[str, tuple[Any, str]] = {
    "a set": ({"bad": {1}}, "'bad'"),
    "bytes": ({"bad": b"x"}, "'bad'"),
    "a tensor": ({"bad": torch.zeros(2)}, "'bad'"),
    "an object": ({"bad": object()}, "'bad'"),
    "a number key": ({"ok": {1: 2}}, "'ok'"),
    "too large an integer": ({"bad": 1 << 64}, "'bad'"),
    "too large": ({"bad": "x" * (64 << 10)}, "'bad'"),
    "too many": ({f"t{i}": 0 for i in range(1025)}, "1025"),
    "no name": ({"": 1}, "name"),
    "a name that is no string": ({5: 1}, "name"),
}


@pytest.mark.parametrize("case", WRONG_TAGS)
def test_tags_that_will_not_do_are_named(plane: Plane, partition: str, case: str) -> None:
    tags, words = WRONG_TAGS[case]
    client = plane.witness
    with pytest.raises(InvalidRequest, match=words):
        client.kv_put("k", partition, tags=tags)
    with pytest.raises(InvalidRequest, match=words):
        client.kv_batch_put(["j", "k"], partition, {"x": torch.zeros(2)}, [{"n": 1}, tags])
    assert partition not in client.status()["partitions"]


@pytest.mark.parametrize("tags", [[{}], [{}, {}, {}, {}], {"a": 1}, [{}, 5, {}], [{}, None, {}]])
def test_tags_are_one_mapping_per_key(client: Any, partition: str, tags: Any) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_batch_put(KEYS, partition, None, tags)
    assert partition not in client.status()["partitions"]


MISMATCHES: dict[str, Any] = {
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "rank": torch.zeros(2, 3, 1),
    "scalar": torch.zeros(2),
    "object": [[0.0], [0.0]],
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_dtype_or_rank_than_the_first_write_is_refused_naming_key_and_field(
    client: Any, partition: str, case: str
) -> None:
    client.kv_put("a", partition, {"x": torch.zeros(3), "y": torch.zeros(3)})
    values = MISMATCHES[case]
    with pytest.raises(SchemaMismatch) as refused:
        client.kv_batch_put(["k1", "k2"], partition, {"y": torch.zeros(2, 3), "x": values})
    error = refused.value
    assert (error.partition_id, error.keys, error.fields) == (partition, ["k1"], ["x"])
    assert "'k1'" in str(error)
    assert "'x'" in str(error)
    assert client.kv_list(partition).keys == ["a"]
    # The schema lasts when the rows are gone, and is the partition's own.
    client.kv_clear(["a"], partition)
    with pytest.raises(SchemaMismatch):
        client.kv_batch_put(["k1", "k2"], partition, {"x": values})
    client.kv_batch_put(["k1", "k2"], f"{partition}-other", {"x": values})


def test_rows_that_differ_from_each_other_are_refused_naming_the_odd_one(
    client: Any, partition: str
) -> None:
    for odd in (torch.zeros(3, dtype=torch.float16), torch.zeros(3, 1), torch.tensor(1.0)):
        with pytest.raises(SchemaMismatch) as refused:
            client.kv_batch_put(KEYS, partition, {"x": [torch.zeros(3), torch.zeros(2), odd]})
        assert (refused.value.keys, refused.value.fields) == (["c"], ["x"])
    assert partition not in client.status()["partitions"]


def test_65536_rows_are_one_put_and_one_more_is_refused(client: Any, partition: str) -> None:
    keys = [f"k{i}" for i in range(65_537)]
    values = torch.arange(65_537)
    tags = [{"n": i} for i in range(65_537)]
    with pytest.raises(InvalidRequest, match="65537"):
        client.kv_batch_put(keys, partition, {"x": values}, tags)
    with pytest.raises(InvalidRequest, match="65537"):
        client.kv_batch_put(keys, partition, None, tags)
    assert partition not in client.status()["partitions"]
    client.kv_batch_put(keys[:-1], partition, {"x": values[:-1]}, tags[:-1])
    listing = client.kv_list(partition, columns=["n"])
    assert len(listing) == 65_536
    assert np.array_equal(listing.column("n"), np.arange(65_536))
    got = client.kv_batch_get(keys[:-1][::-1], partition)
    assert torch.equal(got["x"], values[:-1].flip(0))
    with pytest.raises(InvalidRequest, match="65537"):
        client.kv_batch_get(keys, partition)
    assert client.kv_clear(None, partition, where={}) == 65_536


def test_must_exist_names_every_absent_key(client: Any, partition: str) -> None:
    client.kv_put("there", partition, tags={})
    with pytest.raises(KeyNotFound) as absent:
        client.kv_batch_put(["x", "there", "y"], partition, {"f": torch.zeros(3)}, must_exist=True)
    assert absent.value.keys == ["x", "y"]
    assert client.kv_list(partition).fields == [()]


def test_a_batch_of_many_fields_comes_back_whole(client: Any, partition: str) -> None:
    fields = {f"f{i:03}": torch.full((2, i % 7), i) for i in range(300)}
    client.kv_batch_put(["a", "b"], partition, fields)
    rows = client.kv_batch_get(["b", "a"], partition, layout="packed")
    assert list(rows.fields) == sorted(fields)
    for i, (name, column) in enumerate(sorted(fields.items())):
        assert rows[name].tolist() == [i] * column.numel()
