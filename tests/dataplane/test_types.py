"""Batches by name: methods give new batches, and a batch that cannot be is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import InvalidRequest, KeyNotFound, KVBatchMeta, Revision


def batch(count: int, first: int = 0, partition_id: str = "train") -> KVBatchMeta:
    keys = [f"k{first + i}" for i in range(count)]
    return KVBatchMeta(partition_id, keys, [{"i": first + i} for i in range(count)], ["x"])


ABC = KVBatchMeta("train", ["a", "b", "c"], [{"n": 1}, {"n": 2}, {}], ["x", "y"], Revision(1, 5))


def test_later_revisions_compare_greater() -> None:
    order = [Revision(1, 0), Revision(1, 9), Revision(1, 10), Revision(2, 0), Revision(10, 1)]
    backwards = order[::-1]
    assert sorted(backwards) == order
    assert Revision(1, 2) == Revision(1, 2)


def test_select_takes_keys_in_the_order_asked_for() -> None:
    assert ABC.select(["c", "a"]) == KVBatchMeta(
        "train", ["c", "a"], [{}, {"n": 1}], ["x", "y"], Revision(1, 5)
    )
    assert ABC.select(key for key in "ab").keys == ["a", "b"]
    assert ABC.select([]).keys == []


def test_select_names_all_keys_that_are_not_there() -> None:
    with pytest.raises(KeyNotFound, match="'z', 'y'") as error:
        ABC.select(["z", "a", "y"])
    assert (error.value.partition_id, error.value.keys) == ("train", ["z", "y"])


def test_a_batch_names_each_key_once_however_it_is_made() -> None:
    with pytest.raises(InvalidRequest, match="repeated: 'a', 'b'"):
        KVBatchMeta("train", ["a", "b", "a", "b"], [{}] * 4)
    with pytest.raises(InvalidRequest, match="repeated: 'a'"):
        ABC.select(["a", "a"])
    with pytest.raises(InvalidRequest, match="repeated: 'k1'"):
        KVBatchMeta.concat([batch(2), batch(2, 1)])


def test_tags_and_keys_are_as_many() -> None:
    with pytest.raises(InvalidRequest, match="2 tags for 1 keys"):
        KVBatchMeta("train", ["a"], [{}, {}])


def test_reorder_is_by_a_permutation_only() -> None:
    assert ABC.reorder([2, 0, 1]) == ABC.select(["c", "a", "b"])
    for order in ([0, 1], [0, 1, 2, 3], [0, 0, 1], [1, 2, 3], [-1, 0, 1], []):
        with pytest.raises(InvalidRequest, match="not a permutation of 3 rows"):
            ABC.reorder(order)
    assert batch(0).reorder([]) == batch(0)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (9, 4, [3, 2, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
        (3, 4, [1, 1, 1, 0]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
        (44, 16, [3] * 12 + [2] * 4),
    ],
)
def test_chunk_gives_exactly_as_many_parts_as_asked_for(
    rows: int, parts: int, sizes: list[int]
) -> None:
    chunks = batch(rows).chunk(parts)
    assert [len(chunk) for chunk in chunks] == sizes
    assert KVBatchMeta.concat(chunks) == batch(rows)


@pytest.mark.parametrize("parts", [0, -1])
def test_a_batch_is_not_cut_in_fewer_parts_than_one(parts: int) -> None:
    with pytest.raises(InvalidRequest, match="1 part or more"):
        ABC.chunk(parts)


@given(st.integers(0, 60), st.integers(1, 20))
def test_chunks_differ_by_one_row_at_most_and_join_to_the_batch(rows: int, parts: int) -> None:
    chunks = batch(rows).chunk(parts)
    sizes = [len(chunk) for chunk in chunks]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert KVBatchMeta.concat(chunks) == batch(rows)


def test_concat_has_the_common_fields_and_the_latest_revision() -> None:
    one = KVBatchMeta("train", ["a"], [{}], ["x", "y"], Revision(1, 7))
    two = KVBatchMeta("train", ["b"], [{"n": 1}], ["y", "z"], Revision(2, 1))
    three = KVBatchMeta("train", ["c"], [{}], ["y"], None)
    assert KVBatchMeta.concat([two, one, three]) == KVBatchMeta(
        "train", ["b", "a", "c"], [{"n": 1}, {}, {}], ["y"], Revision(2, 1)
    )
    assert KVBatchMeta.concat([three]).revision is None
    assert KVBatchMeta.concat([one, batch(0)]).fields == ["x"]


def test_what_cannot_be_joined_says_why() -> None:
    with pytest.raises(InvalidRequest, match="nothing to concatenate"):
        KVBatchMeta.concat([])
    with pytest.raises(InvalidRequest, match="different partitions: 'train', 'val'"):
        KVBatchMeta.concat([batch(1), batch(1, 5, "val")])


def test_methods_leave_the_batch_as_it_is_and_share_no_list_with_it() -> None:
    before = KVBatchMeta("train", list(ABC.keys), list(ABC.tags), list(ABC.fields), ABC.revision)
    made = [ABC.select(["b"]), ABC.reorder([2, 1, 0]), *ABC.chunk(2), KVBatchMeta.concat([ABC])]
    for new in made:
        new.keys.append("more")
        new.tags.append({})
        new.fields.append("more")
    assert before == ABC
    with pytest.raises(AttributeError):
        ABC.keys = []
