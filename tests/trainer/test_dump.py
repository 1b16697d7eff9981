"""Trajectory files of rows that lie in a plane: read before they are cleared, written after."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client
from tests.deadline import until
from tests.trainer.rows import tags
from trainer.dump import TrajectoryDump
from trainer.dump.body import DumpBody
from trainer.dump.hosts import host_kind
from trainer.dump.request import DumpRequest
from trainer.ranks.types import PlaneAddress
from trainer.select import Group, group_rows, rows_of

QUESTION = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def settings(plane_settings: dict[str, Any]) -> dict[str, Any]:
    return {**plane_settings, "host": "embedded"}


@pytest.fixture(scope="module")
def plane(settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(settings, name=f"dump-{os.getpid()}")
    yield client
    client.close(destroy=True)


@pytest.fixture
def address(plane: Client, settings: dict[str, Any]) -> PlaneAddress:
    del plane
    return PlaneAddress(name=f"dump-{os.getpid()}", settings=settings)


@pytest.fixture
def partition(plane: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition of this test's own."""
    name = str(request.node.name)
    yield name
    plane.kv_drop_partition(name)


def produce(plane: Client, partition: str, uid: str, *scores: float | None) -> None:
    """A finished group; where a score is None the session has failed."""
    plane.kv_put(
        uid, partition,
        {"messages": QUESTION, "extra": {"row": {"answer": "2"}}},
        {"is_prompt": True, "uid": uid, "status": "pending", "n": len(scores)},
    )  # fmt: skip
    attempt = plane.begin_group(uid, partition, n=len(scores))
    for session, score in enumerate(scores):
        key = f"{uid}_{session}_0"
        if score is None:
            failed = {"uid": uid, "session_id": session, "index": 0, "status": "failed"}
            plane.kv_put(key, partition, tags={**failed, "error_msg": "boom"}, attempt=attempt)
            continue
        answer = {"role": "assistant", "content": f"{uid} says {session}"}
        size = 6 + session
        fields = {
            "input_ids": torch.arange(size),
            "labels": torch.arange(size),
            "messages": [*QUESTION, answer],
            "reward": {"score": score},
        }
        its = tags(uid, session, score=score, response=size - 3)
        plane.kv_put(key, partition, fields, its, attempt=attempt)
    plane.end_group(attempt, "finished")


def groups_of(plane: Client, partition: str) -> list[Group]:
    return group_rows(rows_of(plane.kv_list(partition)))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_file_a_step_of_rows_that_are_cleared_before_it_is_written(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path
) -> None:
    produce(plane, partition, "a", 1.0, 0.0)
    produce(plane, partition, "b", 0.5, None)
    groups = groups_of(plane, partition)
    dump = TrajectoryDump.open(tmp_path / "trajectories", address, kind="thread")
    dump.train(3, partition, groups[:1])
    dump.evaluation(3, partition, groups)
    await dump.read_done()
    plane.kv_clear(None, partition, where={}, retire=True)
    await dump.close()
    await dump.close()
    assert names(tmp_path / "trajectories") == ["eval_rollout_3.jsonl", "train_rollout_3.jsonl"]
    summary, first, second = lines(tmp_path / "trajectories" / "train_rollout_3.jsonl")
    assert (summary["total_len"], summary["reward_mean"]) == (2, 0.5)
    assert (first["rollout_id"], second["rollout_id"]) == ("a_0_0", "a_1_0")
    assert (first["response"], first["label"], first["prompt"]) == ("a says 0", "2", QUESTION)
    assert second["reward_payload"] == {"score": 0.0}
    assert (second["response_len"], second["prompt_len"]) == (4, 3)
    summary, *rows = lines(tmp_path / "trajectories" / "eval_rollout_3.jsonl")
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, 0.0]
    assert rows[3]["error_msg"] == "boom"


async def test_reading_goes_on_beside_the_loop_and_is_waited_for(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    produce(plane, partition, "a", 1.0)
    gate, real = threading.Event(), DumpBody.read

    def late(body: DumpBody, request: DumpRequest) -> list[str]:
        assert gate.wait(60)
        return real(body, request)

    monkeypatch.setattr(DumpBody, "read", late)
    dump = TrajectoryDump.open(tmp_path, address, kind="thread")
    dump.train(1, partition, groups_of(plane, partition))  # returns: training begins
    waiting = asyncio.create_task(dump.read_done())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    await waiting
    await dump.close()
    assert len(lines(tmp_path / "train_rollout_1.jsonl")) == 2


async def test_a_read_that_is_late_holds_up_no_step(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    produce(plane, partition, "a", 1.0)
    gate = threading.Event()

    def never(body: DumpBody, request: DumpRequest) -> list[str]:
        gate.wait(60)
        return []

    monkeypatch.setattr(DumpBody, "read", never)
    dump = TrajectoryDump.open(tmp_path, address, kind="thread", wait_s=0.05)
    groups = groups_of(plane, partition)
    for step in range(1, 6):
        dump.train(step, partition, groups)
    assert "no dump train_rollout_5.jsonl: dumps are 4 steps behind" in caplog.text
    await dump.read_done()
    assert "train_rollout_1.jsonl was not read in 0.05 s" in caplog.text
    gate.set()
    await dump.close()
    dump.train(7, partition, groups)
    assert "no dump train_rollout_7.jsonl: dumps are closed" in caplog.text


def spoil_folder(folder: Path) -> None:
    folder.write_text("a file, where a folder is to be")


def spoil_disk(folder: Path) -> None:
    (folder / "train_rollout_1.jsonl").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [spoil_folder, spoil_disk])
async def test_an_error_of_the_disk_is_logged_and_fails_nothing(
    spoil: Callable[[Path], None],
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    produce(plane, partition, "a", 1.0)
    folder = tmp_path / "trajectories"
    spoil(folder)
    dump = TrajectoryDump.open(folder, address, kind="thread")
    with caplog.at_level(logging.WARNING):
        dump.train(1, partition, groups_of(plane, partition))
        await dump.read_done()
        dump.train(2, partition, groups_of(plane, partition))
        await dump.read_done()
        await dump.close()
    assert "train_rollout_1.jsonl could not be written" in caplog.text
    if spoil is spoil_disk:
        assert not [name for name in names(folder) if name.endswith(".partial")]
        assert len(lines(folder / "train_rollout_2.jsonl")) == 2


async def test_rows_that_are_gone_make_no_half_a_file(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    produce(plane, partition, "a", 1.0, 0.0)
    groups = groups_of(plane, partition)
    plane.kv_clear(["a_1_0"], partition)
    dump = TrajectoryDump.open(tmp_path, address, kind="thread")
    dump.train(1, partition, groups)
    await dump.read_done()
    dump.train(2, partition, groups_of(plane, partition))
    await dump.close()
    assert "train_rollout_1.jsonl could not be read" in caplog.text
    assert "1 trajectories are gone before they were dumped: a_1_0" in caplog.text
    assert names(tmp_path) == ["train_rollout_2.jsonl"]


async def test_a_plane_that_is_not_there_is_logged(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = PlaneAddress(name="no-such-plane", settings=settings)
    dump = TrajectoryDump.open(tmp_path, nowhere, kind="thread")
    dump.train(1, "train", [])
    await dump.read_done()
    await dump.close()
    assert "train_rollout_1.jsonl could not be read: PlaneLost" in caplog.text


async def test_a_disk_that_is_behind_costs_the_dump_and_not_the_memory(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    produce(plane, partition, "a", 1.0)
    groups = groups_of(plane, partition)
    gate, begun = threading.Event(), threading.Event()
    real = DumpBody._write

    def slow(body: DumpBody, request: DumpRequest, rows: list[Any]) -> None:
        begun.set()
        assert gate.wait(60)
        real(body, request, rows)

    monkeypatch.setattr(DumpBody, "_write", slow)
    body = DumpBody(str(tmp_path), address, capacity=1, write_wait_s=0.05)
    assert body.read(DumpRequest.of("train", 1, partition, groups)) == []
    await until(begun.is_set)
    assert body.read(DumpRequest.of("train", 2, partition, groups)) == []
    told = body.read(DumpRequest.of("train", 3, partition, groups))
    assert told == ["train_rollout_3.jsonl was given up: the disk is behind"]
    assert body.finish(0.01) == ["2 dumps were not written in time"]
    gate.set()
    assert body.finish(60) == []
    assert names(tmp_path) == ["train_rollout_1.jsonl", "train_rollout_2.jsonl"]


async def test_a_response_without_text_is_decoded_by_the_models_tokenizer(
    plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"what": 0, "is": 1, "it": 2, "two": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="what"))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "model")
    ids = torch.tensor([0, 1, 2, 3])
    its = tags("a", 0, response=1)
    plane.kv_put("a_0_0", partition, {"input_ids": ids, "labels": ids}, its)
    for path in ("model", "no-model"):
        dump = TrajectoryDump.open(
            tmp_path / f"of-{path}", address, tokenizer_path=str(tmp_path / path), kind="thread"
        )
        dump.train(1, partition, groups_of(plane, partition))
        await dump.close()
    assert lines(tmp_path / "of-model" / "train_rollout_1.jsonl")[1]["response"] == "two"
    assert lines(tmp_path / "of-no-model" / "train_rollout_1.jsonl")[1]["response"] is None
    assert "no tokenizer for dumps" in caplog.text


@pytest.mark.ray
async def test_where_ray_is_an_actor_does_it_on_this_node(
    ray_cluster: list[str], plane: Client, address: PlaneAddress, partition: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    import ray

    del ray_cluster
    produce(plane, partition, "a", 1.0, 0.0)
    groups = groups_of(plane, partition)
    assert host_kind() == "ray"
    dump = TrajectoryDump.open(tmp_path, address)
    dump.train(1, partition, groups)
    await dump.read_done()
    plane.kv_clear(None, partition, where={}, retire=True)
    dump.train(2, partition, groups)
    await dump.read_done()
    assert "train_rollout_2.jsonl could not be read: KeyNotFound" in caplog.text
    await until(lambda: os.path.exists(tmp_path / "train_rollout_1.jsonl"))
    assert len(lines(tmp_path / "train_rollout_1.jsonl")) == 3
    # It dies: the steps that follow have no dump, and go on.
    ray.kill(dump._host._actor)  # type: ignore[attr-defined]
    dump.train(3, partition, groups)
    await dump.read_done()
    assert "no dump train_rollout_3.jsonl: Actor" in caplog.text
    await dump.close()
    assert "dumps did not end well" in caplog.text
