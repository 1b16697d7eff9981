"""Batches of claimed rows: each row once, prefetched, cut by tokens, resumed where it was left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import dataplane
from dataplane import ClaimLost, Client, DeadlineExceeded, InvalidRequest
from tests.deadline import eventually
from trainer.streaming import Batch, StreamingDataset, cut_batches

# -- cut_batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_rows", "expected"),
    [
        ([9, 2, 8, 1, 2], 18, None, [[0, 2], [1, 3, 4]]),
        ([5, 5, 5], 10, None, [[0, 1], [2]]),
        ([5, 5, 5], None, 2, [[0, 1], [2]]),
        ([7], 7, None, [[0]]),
        ([], 7, None, []),
        ([0, 0, 0], 1, 2, [[0, 1], [2]]),
        ([1, 2, 3], None, None, [[0, 1, 2]]),
    ],
)
def test_rows_of_like_length_share_a_batch(
    lengths: list[int], max_tokens: int | None, max_rows: int | None, expected: list[list[int]]
) -> None:
    assert cut_batches(lengths, max_tokens, max_rows) == expected


def test_a_row_that_no_batch_takes_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 9 tokens, and a batch takes 8"):
        cut_batches([3, 9], 8)


@given(
    st.lists(st.integers(0, 64), max_size=60), st.integers(64, 256), st.none() | st.integers(1, 9)
)
def test_every_row_is_in_one_batch_and_no_batch_is_over_a_limit(
    lengths: list[int], max_tokens: int, max_rows: int | None
) -> None:
    batches = cut_batches(lengths, max_tokens, max_rows)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert max(lengths[row] for row in batch) * len(batch) <= max_tokens
        assert max_rows is None or len(batch) <= max_rows


# -- on a plane ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings(plane_settings: dict[str, Any]) -> dict[str, Any]:
    return {**plane_settings, "host": "embedded"}


@pytest.fixture(scope="module")
def plane(settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(settings, name=f"streaming-{os.getpid()}")
    yield client
    client.close(destroy=True)


@pytest.fixture
def train(plane: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition of this test's own."""
    name = str(request.node.name)
    yield name
    plane.kv_drop_partition(name)


def put(plane: Client, partition: str, count: int) -> list[str]:
    """Rows of 1 to 8 tokens; each token is the row's number."""
    keys = [f"r{n}" for n in range(count)]
    lengths = [1 + n % 8 for n in range(count)]
    plane.kv_batch_put(
        keys,
        partition,
        {"input_ids": [torch.full((n,), i) for i, n in enumerate(lengths)]},
        [{"seq_len": n} for n in lengths],
    )
    return keys


def dataset(plane: Client, settings: dict[str, Any], partition: str, **options: Any) -> Any:
    named: dict[str, Any] = {"count": 4, "timeout": 20.0, **options}
    return StreamingDataset(
        partition, "ppo", ["input_ids"], plane=plane.name, config=settings, **named
    )


def values(batch: Batch) -> list[int]:
    """The numbers of a batch's rows, from their tokens."""
    return [int(row[0]) for row in batch.rows["input_ids"].unbind()]


def test_all_rows_come_once_and_the_set_ends_with_a_sealed_partition(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 10)
    plane.kv_seal_partition(train)
    batches = list(dataset(plane, settings, train))
    assert [len(batch.keys) for batch in batches] == [4, 4, 2]
    assert [value for batch in batches for value in values(batch)] == list(range(10))
    assert list(dataset(plane, settings, train)) == []


def test_it_is_a_data_set_of_a_data_loader(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 8)
    plane.kv_seal_partition(train)
    loader: Any = DataLoader(dataset(plane, settings, train), batch_size=None)
    assert [values(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    worker: Any = DataLoader(dataset(plane, settings, train), batch_size=None, num_workers=1)
    with pytest.raises(InvalidRequest, match="num_workers=0"):
        next(iter(worker))


def test_a_claim_is_cut_by_tokens_and_committed_with_its_last_batch(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 8)
    plane.kv_seal_partition(train)
    data = dataset(plane, settings, train, count=8, max_tokens=16)
    seen: list[int] = []
    for batch in data:
        assert max(tags["seq_len"] for tags in batch.tags) * len(batch.keys) <= 16
        seen += values(batch)
        assert data.batch_index == 0
    assert sorted(seen) == list(range(8))
    assert data.batch_index == 1


def test_the_next_claim_is_taken_while_a_batch_is_in_use_and_given_back_at_the_end(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 8)
    batches = iter(dataset(plane, settings, train))
    next(batches)

    def none_is_left() -> bool:
        try:
            claim = plane.kv_claim(train, "ppo", count=1, timeout=0.2)
        except DeadlineExceeded:
            return True
        plane.kv_release(claim)
        return False

    eventually(none_is_left, "the second claim is taken too")
    batches.close()
    assert len(plane.kv_claim(train, "ppo", count=8, timeout=10).keys) == 8


def test_rows_of_a_loop_that_was_left_are_offered_again_and_committed_ones_are_not(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 12)
    plane.kv_seal_partition(train)
    batches = iter(dataset(plane, settings, train))
    assert values(next(batches)) == [0, 1, 2, 3]
    assert values(next(batches)) == [4, 5, 6, 7]  # which commits the first
    batches.close()
    again = list(dataset(plane, settings, train))
    assert [values(batch) for batch in again] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert again[0].claim.deliveries == [2] * 4


def test_what_was_not_committed_beside_a_checkpoint_comes_again_and_nothing_else(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 12)
    plane.kv_seal_partition(train)
    data = dataset(plane, settings, train, auto_commit=False, prefetch=2)
    batches = iter(data)
    next(batches)
    next(batches)
    assert data.commit() == 4  # the second is in use still
    next(batches)
    batches.close()
    again = dataset(plane, settings, train)
    assert [values(batch) for batch in again] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_ranks_share_every_batch_and_go_on_where_they_committed(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 16)
    plane.kv_seal_partition(train)
    states: dict[int, dict[str, int]] = {}

    def rank(number: int, state: dict[str, int] | None = None, steps: int = 9) -> list[list[int]]:
        data = dataset(plane, settings, train, count=8, replica=(number, 2))
        if state is not None:
            data.load_state_dict(state)
        out: list[list[int]] = []
        batches = iter(data)
        for batch in batches:
            out.append(values(batch))
            if len(out) == steps:
                break
        batches.close()
        states[number] = data.state_dict()
        return out

    # Each rank trains its share of batch 0, commits it, gets batch 1 and is stopped.
    first = [rank(0, steps=2), rank(1, steps=2)]
    assert sorted(first[0][0] + first[1][0]) == list(range(8))
    assert states == {0: {"batch_index": 1}, 1: {"batch_index": 1}}
    with ThreadPoolExecutor(2) as pool:
        resumed = list(pool.map(rank, (0, 1), (states[0], states[1])))
    assert [first[0][1], first[1][1]] == [resumed[0][0], resumed[1][0]]
    assert sorted(resumed[0][0] + resumed[1][0]) == list(range(8, 16))


def test_a_loop_waits_for_rows_and_is_woken(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    timer = threading.Timer(0.3, lambda: put(plane, train, 4))
    timer.start()
    batches = iter(dataset(plane, settings, train))
    assert values(next(batches)) == [0, 1, 2, 3]
    batches.close()
    timer.join()


def test_a_deadline_reaches_the_loop_with_its_reason(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 3)
    with pytest.raises(DeadlineExceeded) as late:
        next(iter(dataset(plane, settings, train, timeout=0.3)))
    assert late.value.explanation


def test_rows_cleared_under_a_loop_are_named_by_its_commit(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    put(plane, train, 8)
    batches = iter(dataset(plane, settings, train))
    next(batches)
    plane.kv_clear(["r1"], train)
    with pytest.raises(ClaimLost) as lost:
        next(batches)
    assert lost.value.keys == ["r1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0}, {"count": True}, {"prefetch": 0}, {"max_tokens": 0}, {"max_rows": "3"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(
    plane: Client, settings: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        dataset(plane, settings, "p", **wrong)


def test_rows_without_a_length_are_refused_where_batches_are_cut_by_it(
    plane: Client, settings: dict[str, Any], train: str
) -> None:
    plane.kv_batch_put(["a"], train, {"input_ids": [torch.tensor([1])]})
    with pytest.raises(InvalidRequest, match="seq_len"):
        next(iter(dataset(plane, settings, train, count=1, max_tokens=8)))
