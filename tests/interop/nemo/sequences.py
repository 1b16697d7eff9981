"""The calls that NeMo-RL's adapter makes, in its order, and what they must answer.

A program of its own: `python -m tests.interop.nemo.sequences` runs every case on the
`transfer_queue` that it imports, in one instance on the Ray cluster of RAY_ADDRESS, and prints
what became of each as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.deadline import eventually

Case = Callable[["Adapter", str], None]

CASES: dict[str, Case] = {}
"""What each case shows -> the case; it gets a partition of its own."""

FIELDS = ["input_ids", "input_lengths", "token_mask", "advantages"]


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


class Adapter:
    """Calls of `transfer_queue` as NeMo-RL's adapter makes them, with keywords and all."""

    def __init__(self) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        self.worker = start_worker()
        self.tq: Any = transfer_queue
        base = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
        self.config: Any = OmegaConf.merge(
            base,
            {
                "controller": {"polling_mode": True},
                "backend": {
                    "storage_backend": "SimpleStorage",
                    "SimpleStorage": {"total_storage_size": 1024, "num_data_storage_units": 1},
                },
            },
        )
        self.tq.init(conf=self.config)

    def register(self, partition: str, fields: list[str]) -> None:
        """Declare a partition: a throw-away row of one zero per field, then its end."""
        key = f"__schema__:{partition}:{os.getpid()}:{id(self)}:{time.time_ns()}"
        zeros = TensorDict({field: torch.zeros(1) for field in fields}, batch_size=[1])
        self.tq.kv_batch_put(keys=[key], partition_id=partition, fields=zeros, tags=[{}])
        self.tq.kv_clear(keys=[key], partition_id=partition)

    def put(
        self, keys: list[str], partition: str, fields: TensorDict | None, tags: Any = None
    ) -> None:
        tags = [{} for _ in keys] if tags is None else tags
        self.tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=tags)

    def get(self, keys: list[str], partition: str, fields: list[str]) -> Any:
        return self.tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)

    def fetch(
        self, partition: str, task: str, fields: list[str], size: int, dp_rank: int | None = None
    ) -> Any:
        """One poll of a claim: the batch's metadata, empty if too few rows are ready."""
        return self.tq.get_client().get_meta(
            data_fields=fields, batch_size=size, partition_id=partition, task_name=task,
            mode="fetch", sampling_config={} if dp_rank is None else {"dp_rank": dp_rank},
        )  # fmt: skip

    def claim(
        self, partition: str, task: str, fields: list[str], size: int, dp_rank: int | None = None
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Keys and tags of a claim that has to be answered."""
        meta = self.fetch(partition, task, fields, size, dp_rank)
        assert meta.size > 0, "the claim came back empty"
        keys = self.tq.get_client().kv_retrieve_keys(
            global_indexes=list(meta.global_indexes), partition_id=partition
        )
        return keys, list(meta.custom_meta)

    def consumed(self, partition: str, task: str) -> bool:
        return self.tq.get_client().check_consumption_status(task_name=task, partition_id=partition)

    def clear(self, keys: list[str] | None, partition: str) -> list[str]:
        """The keys that were cleared: those given, or all that are listed."""
        if keys is None:
            keys = list(self.tq.kv_list(partition_id=partition).get(partition, {}))
        if keys:
            self.tq.kv_clear(keys=keys, partition_id=partition)
        return keys


def rows(first: int, count: int) -> TensorDict:
    """Rows with a token column, ragged as of lengths 1, 2, …, a mask, and a scalar each."""
    tokens = [torch.arange(i + 1) + 100 * i for i in range(first, first + count)]
    return TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "input_lengths": torch.tensor([len(t) for t in tokens]),
            "token_mask": torch.ones(count, 4, dtype=torch.int32),
        },
        batch_size=[count],
    )


def names(count: int, prefix: str = "u") -> list[str]:
    return [f"{prefix}{i // 2}_g{i % 2}" for i in range(count)]


@case
def registering_leaves_no_row_and_pins_no_shape(adapter: Adapter, p: str) -> None:
    adapter.register(p, FIELDS)
    adapter.register(p, FIELDS)
    assert not adapter.tq.kv_list(partition_id=p).get(p)
    assert adapter.fetch(p, "train", FIELDS[:1], 1).size == 0
    adapter.put(["a"], p, rows(2, 1))
    got = adapter.get(["a"], p, ["input_ids", "token_mask"])
    assert got["input_ids"].dtype == torch.int64
    assert [row.tolist() for row in got["input_ids"].unbind()] == [[200, 201, 202]]
    assert got["token_mask"].dtype == torch.int32


@case
def registering_beside_writers_harms_neither(adapter: Adapter, p: str) -> None:
    failures: list[BaseException] = []

    def write(worker: int) -> None:
        try:
            for i in range(4):
                adapter.put([f"w{worker}_{i}"], p, rows(i, 1))
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
    for writer in writers:
        writer.start()
    adapter.register(p, [*FIELDS, "late"])
    for writer in writers:
        writer.join(60)
    assert not failures, failures
    expected = {f"w{worker}_{i}" for worker in range(3) for i in range(4)}
    assert set(adapter.tq.kv_list(partition_id=p)[p]) == expected


@case
def rows_come_back_in_the_asked_order_with_their_dtypes(adapter: Adapter, p: str) -> None:
    keys = names(4)
    adapter.put(keys, p, rows(0, 4))
    extra = torch.randn(4, 3, dtype=torch.bfloat16)
    adapter.put(keys, p, TensorDict({"generation_logprobs": extra}, batch_size=[4]))
    asked = [keys[2], keys[0], keys[3]]
    got = adapter.get(asked, p, ["input_ids", "input_lengths", "generation_logprobs"])
    assert got.batch_size == torch.Size([3])
    assert [row.tolist() for row in got["input_ids"].unbind()] == [
        [200, 201, 202], [0], [300, 301, 302, 303],
    ]  # fmt: skip
    assert got["input_lengths"].tolist() == [3, 1, 4]
    # Rows of equal length are nested all the same: the adapter stacks them.
    assert got["generation_logprobs"].is_nested
    stacked = torch.stack(list(got["generation_logprobs"].unbind()))
    assert stacked.dtype == torch.bfloat16
    assert torch.equal(stacked, extra[[2, 0, 3]])


@case
def a_claim_polls_until_enough_rows_are_ready(adapter: Adapter, p: str) -> None:
    adapter.register(p, FIELDS)
    empty = adapter.fetch(p, "train", ["input_ids"], 4)
    assert (empty.size, list(empty.global_indexes)) == (0, [])
    keys = names(6)
    adapter.put(keys[:3], p, rows(0, 3))
    assert adapter.fetch(p, "train", ["input_ids"], 4).size == 0
    adapter.put(keys[3:], p, rows(3, 3))
    first, _ = adapter.claim(p, "train", ["input_ids"], 4)
    second, _ = adapter.claim(p, "train", ["input_ids"], 2)
    assert sorted(first + second) == sorted(keys)
    assert adapter.fetch(p, "train", ["input_ids"], 1).size == 0


@case
def a_claim_brings_the_tags_of_its_rows(adapter: Adapter, p: str) -> None:
    keys = names(4)
    tags = [{"input_lengths": i + 1, "std": 0.5 * i, "weight_version": 7} for i in range(4)]
    adapter.put(keys, p, rows(0, 4), tags)
    claimed, found = adapter.claim(p, "train", ["input_ids"], 4)
    assert dict(zip(claimed, found, strict=True)) == dict(zip(keys, tags, strict=True))
    data = adapter.get(claimed, p, ["input_lengths"])
    assert data["input_lengths"].tolist() == [tag["input_lengths"] for tag in found]


@case
def a_field_that_is_missing_gates_a_claim(adapter: Adapter, p: str) -> None:
    keys = names(4)
    adapter.put(keys, p, rows(0, 4))
    needs = ["input_ids", "advantages"]
    assert adapter.fetch(p, "train", needs, 2).size == 0
    some = [keys[3], keys[1]]
    adapter.put(some, p, TensorDict({"advantages": torch.tensor([0.5, -0.5])}, batch_size=[2]))
    assert adapter.fetch(p, "train", needs, 3).size == 0
    claimed, _ = adapter.claim(p, "train", needs, 2)
    assert set(claimed) == set(some)
    got = dict(zip(claimed, adapter.get(claimed, p, needs)["advantages"].tolist(), strict=True))
    assert got == {keys[3]: 0.5, keys[1]: -0.5}


@case
def tasks_and_ranks_claim_for_themselves(adapter: Adapter, p: str) -> None:
    keys = names(4)
    adapter.put(keys, p, rows(0, 4))
    ranks = [adapter.claim(p, "train", ["input_ids"], 2, dp_rank=rank)[0] for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == sorted(keys)
    assert not set(ranks[0]) & set(ranks[1])
    assert len(adapter.claim(p, "reference", ["input_ids"], 4)[0]) == 4
    # A claim moves a cursor and nothing else: the rows are there for everybody.
    assert adapter.get(keys, p, ["input_lengths"])["input_lengths"].tolist() == [1, 2, 3, 4]


@case
def consumption_is_true_when_every_row_was_claimed(adapter: Adapter, p: str) -> None:
    keys = names(4)
    adapter.put(keys, p, rows(0, 4))
    assert not adapter.consumed(p, "train")
    adapter.claim(p, "train", ["input_ids"], 3)
    assert not adapter.consumed(p, "train")
    adapter.claim(p, "train", ["input_ids"], 1)
    assert adapter.consumed(p, "train")
    assert not adapter.consumed(p, "reference")
    adapter.put(["more"], p, rows(4, 1))
    assert not adapter.consumed(p, "train")


@case
def cleared_rows_are_gone_for_every_verb(adapter: Adapter, p: str) -> None:
    keys = names(6)
    adapter.put(keys, p, rows(0, 6))
    adapter.claim(p, "train", ["input_ids"], 2)
    gone, left = keys[2:4], keys[:2] + keys[4:]
    adapter.clear(gone, p)
    adapter.clear(gone, p)
    assert set(adapter.tq.kv_list(partition_id=p)[p]) == set(left)
    with pytest.raises(ValueError, match="not found"):
        adapter.get(gone, p, ["input_ids"])
    claimed, _ = adapter.claim(p, "train", ["input_ids"], 2)
    assert set(claimed) == set(keys[4:])
    assert set(adapter.clear(None, p)) == set(left)
    assert adapter.clear(None, p) == []
    assert adapter.fetch(p, "train", ["input_ids"], 1).size == 0


@case
def a_key_written_again_is_a_new_row(adapter: Adapter, p: str) -> None:
    adapter.put(["a", "b"], p, rows(0, 2), [{"step": 1}, {"step": 1}])
    adapter.claim(p, "train", ["input_ids"], 2)
    adapter.clear(None, p)
    adapter.put(["a"], p, rows(5, 1), [{"round": 2}])
    claimed, tags = adapter.claim(p, "train", ["input_ids"], 1)
    assert (claimed, tags) == (["a"], [{"round": 2}])
    assert adapter.get(["a"], p, ["input_lengths"])["input_lengths"].tolist() == [6]


@case
def columns_written_later_are_read_with_the_first(adapter: Adapter, p: str) -> None:
    """A training step by keys: first write, worker's column, driver's column, read, clear."""
    adapter.register(p, [*FIELDS, "prev_logprobs"])
    keys = names(4)
    adapter.put(keys, p, rows(0, 4), [{"input_lengths": i + 1} for i in range(4)])
    for shard in (keys[:2], keys[2:]):
        read = adapter.get(shard, p, ["input_ids", "input_lengths"])
        lengths = read["input_ids"].offsets().diff().tolist()
        assert lengths == read["input_lengths"].tolist()
        logprobs = [torch.full((n,), -float(n)) for n in lengths]
        nested = torch.nested.as_nested_tensor(logprobs, layout=torch.jagged)
        adapter.put(shard, p, TensorDict({"prev_logprobs": nested}, batch_size=[2]))
    sums = adapter.get(keys, p, ["prev_logprobs"])["prev_logprobs"]
    advantages = torch.stack([row.sum() for row in sums.unbind()])
    adapter.put(keys, p, TensorDict({"advantages": advantages}, batch_size=[4]))
    data = adapter.get(keys, p, ["input_ids", "prev_logprobs", "advantages"])
    assert data["advantages"].tolist() == [-1.0, -4.0, -9.0, -16.0]
    assert sorted(adapter.clear(None, p)) == sorted(keys)
    assert not adapter.tq.kv_list(partition_id=p).get(p)


@case
def a_worker_process_joins_without_settings(adapter: Adapter, p: str) -> None:
    import ray

    worker = adapter.worker
    assert ray.get(worker.join.remote(), timeout=60) is None
    ray.get(worker.write.remote(p, names(4)), timeout=60)
    claimed, tags = adapter.claim(p, "train", ["x"], 2)
    assert tags == [{"from": "worker"}] * 2
    theirs = ray.get(worker.claim.remote(p, 2), timeout=60)
    assert sorted(claimed + theirs) == sorted(names(4))
    assert ray.get(worker.claim.remote(p, 1), timeout=60) == []
    ray.kill(worker)
    # The worker's end is nobody else's.
    eventually(lambda: adapter.consumed(p, "train"), "the instance answers")


def start_worker() -> Any:
    """A worker process on the cluster. It begins before the instance does, to save its time."""
    import ray

    class Worker:
        def join(self) -> Any:
            import transfer_queue

            self.tq: Any = transfer_queue
            return self.tq.init()

        def write(self, partition: str, keys: list[str]) -> None:
            fields = TensorDict({"x": torch.arange(len(keys))}, batch_size=[len(keys)])
            tags = [{"from": "worker"} for _ in keys]
            self.tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=tags)

        def claim(self, partition: str, size: int) -> list[str]:
            client = self.tq.get_client()
            meta = client.get_meta(
                data_fields=["x"], batch_size=size, partition_id=partition, task_name="train",
                mode="fetch", sampling_config={"dp_rank": 1},
            )  # fmt: skip
            if not meta.size:
                return []
            return client.kv_retrieve_keys(
                global_indexes=list(meta.global_indexes), partition_id=partition
            )

    remote: Any = ray.remote(num_cpus=0)(Worker)
    return remote.remote()


def run() -> Iterator[tuple[str, str]]:
    """Each case and what went wrong with it: nothing, or a traceback."""
    adapter = Adapter()
    try:
        for name, run_case in CASES.items():
            try:
                run_case(adapter, f"train-{name}")
            except Exception:
                yield name, traceback.format_exc()
            else:
                yield name, ""
    finally:
        adapter.tq.close()
        adapter.tq.close()


if __name__ == "__main__":
    import ray

    # Which instance, and where its plane lies, is known to workers by the same variables.
    settings = {name: value for name, value in os.environ.items() if name.startswith("DATAPLANE_")}
    ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": settings})
    print(json.dumps(dict(run())))
    sys.stdout.flush()
