"""A dataset's place in the stream: batches by number, another pass, what is kept and what goes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset, streaming_dataset
from transfer_queue.metadata import BatchMeta

from dataplane.errors import DeadlineExceeded, InvalidRequest

ROOT = Path(__file__).parents[3]

CONFIG: dict[str, Any] = {
    "controller": {"zmq_info": {"plane": "none", "address": "/none", "config": {}}},
    "backend": {"storage_backend": "SimpleStorage"},
}
COUNT = 4


class Consumed:
    """What is asked of the client when a partition may come to its end."""

    def __init__(self, after: int) -> None:
        self.looks_left = after

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        assert (task_name, partition_id) == ("train", "p")
        self.looks_left -= 1
        return self.looks_left < 0


class Stream:
    """Answers for `fetch_batch_fn`: batch `i` has the rows 2i and 2i + 1, and 16 bytes."""

    def __init__(self, count: int = COUNT, empty_first: int = 0) -> None:
        self.count = count
        self.empty = empty_first
        self.asked: list[int] = []

    def __call__(self, **asked: Any) -> Any:
        number = asked["batch_index"]
        self.asked.append(number)
        if self.empty or number >= self.count:
            self.empty -= 1
            return None, BatchMeta.empty()
        rows = [2 * number, 2 * number + 1]
        return TensorDict({"x": torch.tensor(rows)}, batch_size=[2]), BatchMeta(rows, ["p"] * 2)


def dataset(fetch: Any, looks: int | None = None, **more: Any) -> StreamingDataset:
    arguments = {
        "config": CONFIG, "batch_size": 2, "micro_batch_size": 1, "data_fields": ["x"],
        "partition_id": "p", "task_name": "train", "dp_rank": 3, "fetch_batch_fn": fetch,
        "should_check_consumption_status": looks is not None, **more,
    }  # fmt: skip
    made = StreamingDataset(**arguments)
    client: Any = Consumed(COUNT if looks is None else looks)
    made._tq_client = client
    return made


def rows(items: Any) -> list[int]:
    return [row for data, _ in items for row in data["x"].tolist()]


def test_batches_are_asked_for_one_by_one_and_come_in_micro_batches() -> None:
    asked: list[dict[str, Any]] = []
    stream = Stream()

    def fetch(**arguments: Any) -> Any:
        asked.append(arguments)
        return stream(**arguments)

    found = list(dataset(fetch, looks=COUNT))
    assert rows(found) == list(range(2 * COUNT))
    assert [of.global_indexes for _, of in found] == [[row] for row in range(2 * COUNT)]
    assert stream.asked == list(range(COUNT))
    asked[0].pop("tq_client")
    assert asked[0] == {
        "data_fields": ["x"], "batch_size": 2, "partition_id": "p", "task_name": "train",
        "sampling_config": {"dp_rank": 3, "task_name": "train"}, "batch_index": 0,
    }  # fmt: skip


def test_another_pass_is_over_what_was_kept() -> None:
    stream = Stream()
    of = dataset(stream, looks=COUNT)
    first = rows(of)
    of.reset()
    assert rows(of) == first
    assert stream.asked == list(range(COUNT))


def test_a_step_lets_go_of_the_batches_and_names_the_partition() -> None:
    of = dataset(Stream(), looks=COUNT)
    list(of)
    of.step("q")
    assert (of.partition_id, of.buffer, of.batch_index) == ("q", [], 0)


def test_what_is_kept_is_bounded_and_a_pass_that_misses_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming_dataset, "REPLAY_BYTES", 40)
    of = dataset(Stream(), looks=COUNT)
    assert rows(of) == list(range(2 * COUNT))
    assert rows(of.buffer) == [4, 5, 6, 7]
    with pytest.raises(InvalidRequest, match=r"first 2 batches.*TQ_STREAMING_DATASET_REPLAY_BYTES"):
        of.reset()
    of.step("p")
    of.reset()


def test_the_newest_batch_is_kept_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_dataset, "REPLAY_BYTES", 1)
    of = dataset(Stream(), looks=COUNT)
    assert rows(of) == list(range(2 * COUNT))
    assert len(of.buffer) == 1


def test_an_empty_answer_is_tried_again_after_pauses_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(streaming_dataset.time, "sleep", pauses.append)
    of = dataset(Stream(empty_first=9), looks=9 + COUNT)
    assert rows(of) == list(range(2 * COUNT))
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert max(pauses) == streaming_dataset.LONGEST_PAUSE_S


def test_a_batch_that_never_comes_ends_in_an_error_that_says_which() -> None:
    config = {**CONFIG, "controller": {"zmq_info": {"config": {"wait_timeout_s": 0.05}}}}
    of = dataset(Stream(count=0), config=config)
    with pytest.raises(DeadlineExceeded, match=r"batch 0 of partition 'p'.*task 'train', rank 3"):
        next(iter(of))


def test_a_wait_that_ends_without_rows_is_no_error_while_the_end_is_looked_for() -> None:
    stream = Stream(count=1)

    def fetch(**asked: Any) -> Any:
        if asked["batch_index"] == 1:
            raise DeadlineExceeded("no rows", waited_s=1.0)
        return stream(**asked)

    assert rows(dataset(fetch, looks=3)) == [0, 1]
    endless = iter(dataset(fetch))
    assert rows([next(endless), next(endless)]) == [0, 1]
    with pytest.raises(DeadlineExceeded, match="no rows"):
        next(endless)


def share_out() -> None:
    """The batches of two forked workers."""
    of = dataset(Stream(), looks=2)
    loader = StreamingDataLoader(of, num_workers=2)
    # Worker 0 has the batches 0 and 2, worker 1 has 1 and 3.
    assert sorted(rows(loader)) == list(range(2 * COUNT))
    assert loader.get_buffer() == []


def test_workers_share_the_batches_out_and_none_is_asked_for_twice() -> None:
    """In a process of its own: a worker that is forked from one with threads of gRPC, as other
    tests leave them, may die of those."""
    code = (
        "import dataplane.compat; dataplane.compat.activate(); "
        "from tests.dataplane.compat.test_streaming_dataset import share_out; share_out()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


def test_a_loader_without_workers_is_the_dataset() -> None:
    of = dataset(Stream(), looks=COUNT)
    loader = StreamingDataLoader(of)
    assert rows(loader) == list(range(2 * COUNT))
    assert loader.get_buffer() is of.buffer
    loader.reset()
    assert rows(loader) == list(range(2 * COUNT))
    loader.step("q")
    assert of.partition_id == "q"


def test_a_dataset_travels_without_its_client() -> None:
    of = dataset(None)
    again = pickle.loads(pickle.dumps(of))  # noqa: S301 (our own bytes)
    assert again._tq_client is None
    assert (again.dp_rank, again.partition_id, again.config) == (3, "p", CONFIG)


@pytest.mark.parametrize("wrong", [{"micro_batch_size": 0}, {"data_fields": []}, {"dp_rank": -1}])
def test_arguments_that_cannot_be_are_value_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataset(None, **wrong)


def test_a_config_that_was_never_stored_is_refused() -> None:
    of = dataset(None, config={"controller": {"zmq_info": None}})
    of._tq_client = None
    with pytest.raises(InvalidRequest, match=r"controller\.zmq_info"):
        next(iter(of))
