"""Streaming, checkpoints and metrics of one instance, with its controller and its plane."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane import compat
from dataplane.errors import CheckpointDamaged, InvalidRequest
from tests.deadline import eventually

if compat.folder() not in sys.path:
    sys.path.insert(0, compat.folder())

import transfer_queue as tq
from transfer_queue import checkpoint

pytestmark = pytest.mark.ray

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def config(ray_cluster: list[str], runtime_dir: Path) -> Iterator[Any]:
    """The settings of an instance whose claims wait, and whose sampler knows ranks."""
    settings = {
        "controller": {"sampler": "RankAwareSampler"},
        "metrics": {"enabled": True},
        "dataplane": {
            "runtime_dir": str(runtime_dir), "start_timeout_s": 60.0, "wait_timeout_s": 30.0,
            "capacity_bytes": 256 << 20, "segment_bytes": 16 << 20, "linger_s": 5.0,
        },
    }  # fmt: skip
    stored = tq.init(settings)
    folder = runtime_dir / tq.get_client().link.joined.plane_id
    assert folder.is_dir()
    yield stored
    tq.close()
    eventually(lambda: not folder.exists(), "the plane ends with its instance")


@pytest.fixture
def partition(config: Any) -> Iterator[str]:
    yield f"p{next(_numbers)}"
    for name in tq.kv_list():
        tq.get_client().clear_partition(name)


def put(partition: str, rows: range) -> None:
    data = TensorDict({"n": torch.tensor(list(rows))}, batch_size=[len(rows)])
    tq.kv_batch_put([f"k{row}" for row in rows], partition, data, [{"row": row} for row in rows])


def claim(partition: str, rank: int, batch: int, size: int = 2, task: str = "train") -> list[str]:
    """The keys of a rank's batch."""
    meta = tq.get_client().get_meta(
        ["n"], size, partition, task_name=task,
        sampling_config={"dp_rank": rank, "batch_index": batch},
    )  # fmt: skip
    return tq.get_client().kv_retrieve_keys(meta.global_indexes, partition)


def dataset(config: Any, partition: str, rank: int = 0, **more: Any) -> Any:
    return tq.StreamingDataset(
        config=config, batch_size=2, micro_batch_size=1, data_fields=["n"],
        partition_id=partition, task_name="train", dp_rank=rank, **more,
    )  # fmt: skip


def numbers(items: Any) -> list[int]:
    return [row for data, _ in items for row in data["n"].tolist()]


# -- streaming -------------------------------------------------------------------------------


def test_a_stream_waits_for_rows_and_is_woken_by_them(config: Any, partition: str) -> None:
    stream = iter(dataset(config, partition))
    put(partition, range(2))
    assert numbers([next(stream), next(stream)]) == [0, 1]
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(next(stream)))
    reader.start()
    put(partition, range(2, 3))  # one row is no batch yet
    assert not found
    put(partition, range(3, 4))
    reader.join(20)
    assert numbers(found) == [2]


def test_forked_workers_of_a_rank_share_its_rows_out(config: Any, partition: str) -> None:
    put(partition, range(8))
    of = dataset(config, partition, should_check_consumption_status=True)
    loader = tq.StreamingDataLoader(of, num_workers=2)
    assert sorted(numbers(loader)) == list(range(8))


def test_replicas_of_a_rank_get_its_rows_and_other_ranks_get_others(
    config: Any, partition: str
) -> None:
    put(partition, range(4))
    streams = [iter(dataset(config, partition, rank)) for rank in (0, 0, 1)]
    one, replica, other = (numbers([next(stream), next(stream)]) for stream in streams)
    assert one == replica
    assert sorted(one + other) == list(range(4))


# -- checkpoints -----------------------------------------------------------------------------


def test_a_checkpoint_takes_the_place_of_what_is_there(partition: str, tmp_path: Path) -> None:
    data = TensorDict(
        {
            "n": torch.arange(6),
            "v": torch.nested.as_nested_tensor(
                [torch.full((row,), row) for row in range(6)], layout=torch.jagged
            ),
            "o": NonTensorStack(*[{"row": row} for row in range(6)]),
        },
        batch_size=[6],
    )
    keys = [f"k{row}" for row in range(6)]
    tq.kv_batch_put(keys, partition, data, [{"row": row} for row in range(6)])
    drawn = claim(partition, rank=1, batch=7)
    tq.save_checkpoint(tmp_path / "saved", metadata={"global_steps": 3})
    before = tq.kv_list()

    tq.kv_clear(keys[:3], partition)
    tq.kv_batch_put(["k9"], partition, tags=[{"row": 9}])
    tq.kv_put("x", f"{partition}-other", tag={"x": 1})
    late = claim(partition, rank=0, batch=0)
    newest = max(tq.get_client().get_meta([], 1, partition, mode="force_fetch").global_indexes)
    tq.load_checkpoint(tmp_path / "saved")

    assert tq.kv_list() == before
    got = tq.kv_batch_get(keys, partition)
    assert got["n"].tolist() == list(range(6))
    assert [row.tolist() for row in got["v"].unbind()] == [[row] * row for row in range(6)]
    assert got["o"] == [{"row": row} for row in range(6)]
    # What was drawn is remembered by rank and batch, consumed by its task, and nothing else is.
    assert claim(partition, rank=1, batch=7) == drawn
    assert set(late) & set(keys)
    left = [*claim(partition, rank=0, batch=0), *claim(partition, rank=0, batch=1)]
    assert sorted([*drawn, *left]) == keys
    # Indexes go on: none is given out twice.
    tq.kv_put("new", partition, {"n": torch.tensor(10)})
    assert tq.get_client().kv_retrieve_meta(["new"], partition).global_indexes[0] > newest


def test_what_is_saved_is_described_beside_it_and_saved_over(
    partition: str, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "saved"
    put(partition, range(2))
    tq.save_checkpoint(path, metadata={"step": 1})
    put(partition, range(2, 3))
    tq.save_checkpoint(str(path), include_storage=False, metadata={"step": 2})
    about = json.loads((path / "metadata.json").read_text())
    assert about == {"storage_saved": True, "user_metadata": {"step": 2}, "format": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]
    tq.get_client().clear_partition(partition)
    tq.load_checkpoint(path)
    assert len(tq.kv_list(partition)[partition]) == 3


def test_a_save_that_fails_leaves_what_was_there(
    partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(partition, range(2))
    path = tmp_path / "saved"
    tq.save_checkpoint(path)

    def fail(*_: Any) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no disk"):
        patch.setattr(tq.TransferQueueClient, "save_controller_checkpoint", fail)
        tq.save_checkpoint(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(TypeError, match="JSON"):
        tq.save_checkpoint(path, metadata={"step": torch.tensor(1)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(InvalidRequest, match="holds no checkpoint"):
        tq.save_checkpoint(tmp_path / "mine")
    tq.load_checkpoint(path)


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("metadata.json", CheckpointDamaged),
        ("controller_state.pkl", CheckpointDamaged),
        ("simple_storage/plane/manifest.json", CheckpointDamaged),
        ("simple_storage/plane/0-tags.parquet", CheckpointDamaged),
    ],
)
def test_a_damaged_file_is_named_and_changes_nothing(
    partition: str, tmp_path: Path, file: str, error: type[Exception]
) -> None:
    put(partition, range(2))
    tq.save_checkpoint(tmp_path / "saved")
    put(partition, range(5))
    path = tmp_path / "saved" / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(error, match=Path(file).name):
        tq.load_checkpoint(tmp_path / "saved")
    path.unlink()
    with pytest.raises((FileNotFoundError, CheckpointDamaged), match=Path(file).name):
        tq.load_checkpoint(tmp_path / "saved")
    assert len(tq.kv_list(partition)[partition]) == 5


def test_a_checkpoint_that_the_peer_wrote_is_refused_without_reading_its_pickle(
    partition: str, tmp_path: Path
) -> None:
    put(partition, range(2))
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        tq.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"metadata\.json not found"):
        tq.load_checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text('{"storage_saved": true, "user_metadata": {}}')
    (tmp_path / "controller_state.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(InvalidRequest, match="TransferQueue itself saved"):
        tq.load_checkpoint(tmp_path)
    assert len(tq.kv_list(partition)[partition]) == 2


def test_the_parts_of_a_checkpoint_are_awaitable(partition: str, tmp_path: Path) -> None:
    client = tq.get_client()
    put(partition, range(3))
    first = claim(partition, rank=0, batch=0)

    async def save_and_load() -> None:
        await client.async_save_storage_checkpoint(str(tmp_path))
        await client.async_save_controller_checkpoint(str(tmp_path / "state"))
        await client.async_clear_partition(partition)
        await client.async_load_storage_checkpoint(str(tmp_path))
        await client.async_load_controller_checkpoint(str(tmp_path / "state"))

    asyncio.run(save_and_load())
    taken = json.loads((tmp_path / "state").read_text())
    taken["next"] += 10_000  # as if all of it came from another instance, which was further
    (tmp_path / "state").write_text(json.dumps(taken))
    client.load_controller_checkpoint(str(tmp_path / "state"))
    put(partition, range(7, 8))
    assert client.kv_retrieve_meta(["k7"], partition).global_indexes == [taken["next"]]

    units = json.loads((tmp_path / checkpoint.STORAGE / checkpoint.UNITS).read_text())
    assert [unit["position"] for unit in units] == list(range(len(units)))
    assert claim(partition, rank=0, batch=0) == first
    assert client.check_consumption_status("train", partition) is False


# -- metrics ---------------------------------------------------------------------------------


def test_metrics_of_controller_and_plane_are_served(config: Any, partition: str) -> None:
    put(partition, range(4))
    claim(partition, rank=0, batch=0)
    endpoint = tq.get_metrics_endpoint()
    assert endpoint == config.metrics.endpoint
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert f'tq_partition_samples_total{{partition_id="{partition}"}} 4.0' in text
    assert (
        f'tq_partition_consumption_progress{{partition_id="{partition}",task_name="train"}} 0.5'
        in text
    )
    assert f'dataplane_partition_payload_bytes{{partition_id="{partition}"}} 32.0' in text
    assert 'tq_controller_request_samples_total{op_type="FETCH"}' in text
    assert "dataplane_up 1.0" in text
