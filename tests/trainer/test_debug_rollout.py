"""Batches in files: what is trained again is what was trained, and hostile files are refused."""

from __future__ import annotations

import os
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataplane
from dataplane import AsyncClient, Client, KeyNotFound, async_connect
from tests.trainer.rows import tags
from trainer.advantage import AdvantageConfig, advantages, batch_statistics
from trainer.debug_rollout import (
    BadDebugRollout,
    DebugRollout,
    SavedRow,
    capture,
    load,
    replay,
    save,
    saved_steps,
)
from trainer.plan import PlanConfig, make_plan
from trainer.select import Group, ReplayPolicy, decide, group_rows, rows_of, select_valid


@pytest.fixture(scope="module")
def settings(plane_settings: dict[str, Any]) -> dict[str, Any]:
    return {**plane_settings, "host": "embedded"}


@pytest.fixture(scope="module")
def plane(settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(settings, name=f"debug-rollout-{os.getpid()}")
    yield client
    client.close(destroy=True)


@pytest.fixture
async def client(plane: Client, settings: dict[str, Any]) -> AsyncIterator[AsyncClient]:
    del plane
    async with await async_connect(f"debug-rollout-{os.getpid()}", config=settings) as joined:
        yield joined


@pytest.fixture
def partition(plane: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition of this test's own, with a limit: groups declare what they take."""
    name = str(request.node.name)
    plane.kv_create_partition(name, quota={"bytes": 32 << 20})
    yield name
    plane.kv_drop_partition(name)


def produce(plane: Client, partition: str) -> None:
    """Three groups of different shapes."""
    rng = np.random.default_rng(7)
    for uid, scores in (("b", [1.0, 0.0, 0.3]), ("a", [0.1, 0.7]), ("c", [1.0, 0.5])):
        prompt = {"is_prompt": True, "uid": uid, "status": "pending", "n": len(scores)}
        images = {"pixels": torch.rand(4, 3).to(torch.bfloat16), "grid": np.array([1, 2])}
        plane.kv_put(
            uid, partition,
            {"extra": {"row": {"answer": "5"}}, "multi_modal_inputs": images},
            {**prompt, "global_steps": 4, "task_name": "sums"},
        )  # fmt: skip
        attempt = plane.begin_group(uid, partition, n=len(scores), declared_bytes=1 << 20)
        for session, score in enumerate(scores):
            response = 2 + int(rng.integers(1, 9))
            size = response + 3
            fields: dict[str, Any] = {
                "input_ids": torch.arange(size),
                "labels": torch.arange(size) - 1,
                "logprobs": torch.as_tensor(rng.normal(size=size), dtype=torch.float32),
                "reward": {"score": score, "parts": (1, None, b"x"), "big": 1 << 70},
                "weight": torch.tensor(score),
            }
            if session == 1:
                fields["routed_experts"] = torch.arange((size - 1) * 2).reshape(-1, 2)
                fields["routed_experts"] = fields["routed_experts"].to(torch.uint16)
            its = tags(
                uid, session, score=score, response=response, attempt=attempt, num_turns=session,
                min_global_steps=3, max_global_steps=4, policy_spans=[[3, response - 1], [4, 1]],
            )  # fmt: skip
            plane.kv_put(f"{uid}_{session}_0", partition, fields, its, attempt=attempt)
        plane.end_group(attempt, "finished")


def taken(plane: Client, partition: str) -> tuple[Group, ...]:
    """What a controller takes for the step."""
    groups = group_rows(rows_of(plane.kv_list(partition)))
    return tuple(decide(groups, ReplayPolicy(), step=5, batch_size=3).selected)


def data_info(groups: tuple[Group, ...], raw_rewards: tuple[float, int]) -> dict[str, float]:
    """All that the controller logs of a batch, without times."""
    selection = select_valid(groups)
    result = advantages(selection.groups, AdvantageConfig())
    plan = make_plan(
        [row.train_len for row in selection.trajectories],
        PlanConfig(cap=16, optimizer_steps=2, strategy="balance"),
        2,
        keys=selection.keys,
        step=5,
    )
    statistics = batch_statistics(selection.trajectories, result, raw_rewards=raw_rewards)
    return {**statistics, **plan.metrics()}


def alike(one: Any, other: Any) -> bool:
    """Equal in type and value, all the way down; arrays of a map come back as tensors."""
    if isinstance(one, np.ndarray):
        one = torch.tensor(one)
    if isinstance(other, np.ndarray):
        other = torch.tensor(other)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def values_of(plane: Client, partition: str) -> dict[str, dict[str, Any]]:
    listing = plane.kv_list(partition)
    found: dict[str, dict[str, Any]] = {}
    for key, names in zip(listing.keys, listing.fields, strict=True):
        got = plane.kv_batch_get([key], partition, names, layout="list")
        found[key] = {name: got[name][0] for name in names}
    return found


async def test_a_replayed_batch_has_the_same_data_info_tags_and_values(
    plane: Client, client: AsyncClient, partition: str, tmp_path: Path
) -> None:
    produce(plane, partition)
    groups, raw = taken(plane, partition), (12.5, 20)
    info = data_info(groups, raw)
    before, values = plane.kv_list(partition), values_of(plane, partition)
    rollout = await capture(client, partition, groups, step=5, raw_rewards=raw)
    path = await save(tmp_path / "debug", rollout)
    assert path.name == "debug_rollout_5.pt"
    assert [path.name for path in path.parent.iterdir()] == ["debug_rollout_5.pt"]
    plane.kv_clear(None, partition, where={}, retire=True)

    loaded = await load(tmp_path / "debug", 5)
    assert loaded.raw_rewards == raw
    await replay(client, partition, loaded)
    again = taken(plane, partition)
    assert data_info(again, loaded.raw_rewards) == info
    assert [group.uid for group in again] == [group.uid for group in groups]
    assert [(g.status, g.n, g.global_steps) for g in again] == [
        ("finished", n, 4) for n in (3, 2, 2)
    ]
    after = plane.kv_list(partition)

    def bare(listing: Any) -> dict[str, dict[str, Any]]:
        return {
            key: {name: value for name, value in its.items() if name != "attempt"}
            for key, its in zip(listing.keys, listing.tags, strict=True)
        }

    assert bare(after) == bare(before)
    assert alike(values_of(plane, partition), values)
    # Whole groups, as a replay buffer claims them.
    claim = plane.kv_claim(
        partition, "train", count=3, fields=["input_ids"], groups=True, timeout=20,
        where={"session_id": {"exists": True}},
    )  # fmt: skip
    assert len(claim) == 7


async def test_rows_without_a_prompt_and_failed_sessions_come_back(
    plane: Client, client: AsyncClient, partition: str, tmp_path: Path
) -> None:
    plane.kv_put("x_0_0", partition, {"input_ids": torch.arange(6)}, tags("x"))
    failed = {"uid": "x", "session_id": 1, "index": 0, "status": "failed", "error_msg": "boom"}
    plane.kv_put("x_1_0", partition, tags=failed)
    groups = group_rows(rows_of(plane.kv_list(partition)))
    await save(tmp_path, await capture(client, partition, groups, step=0))
    plane.kv_clear(None, partition, where={})
    await replay(client, partition, await load(tmp_path, 0))
    listing = plane.kv_list(partition)
    assert listing.keys == ["x_0_0", "x_1_0"]
    assert listing.tags == [tags("x"), failed]
    assert listing.fields == [("input_ids",), ()]


async def test_rows_that_are_gone_are_named(
    plane: Client, client: AsyncClient, partition: str
) -> None:
    produce(plane, partition)
    groups = taken(plane, partition)
    plane.kv_clear(["a_0_0", "b"], partition)
    with pytest.raises(KeyNotFound) as raised:
        await capture(client, partition, groups, step=5)
    assert set(raised.value.keys) == {"a_0_0", "b"}


# -- files -----------------------------------------------------------------------------------


def empty(step: int) -> DebugRollout:
    return DebugRollout(step, ())


async def test_a_step_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"debug_rollout_\*\.pt"):
        await load(tmp_path, 1)
    for step in (2, 10, 3):
        await save(tmp_path, empty(step))
    assert saved_steps(tmp_path) == [2, 3, 10]
    with pytest.raises(FileNotFoundError, match="step 4; it has those of 2 to 10"):
        await load(tmp_path, 4)


@pytest.mark.parametrize(
    "name",
    ["debug_rollout_x.pt", "debug_rollout_1.5.pt", "debug_rollout_.pt", "debug_rollout_01.pt"],
)
async def test_another_name_is_refused(name: str, tmp_path: Path) -> None:
    await save(tmp_path, empty(1))
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=name):
        saved_steps(tmp_path)
    with pytest.raises(ValueError, match=name):
        await load(tmp_path, 1)


class Hostile:
    """What runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def content(**changes: Any) -> dict[str, Any]:
    row = {"key": "k", "tags": {}, "fields": {"input_ids": torch.arange(4)}}
    prompts = [{"uid": "u", "prompt": None, "rows": [row]}]
    return {"format": 1, "step": 1, "raw_rewards": [0.0, 0], "prompts": prompts, **changes}


def of(**row: Any) -> dict[str, Any]:
    return content(prompts=[{"uid": "u", "prompt": None, "rows": [row]}])


def command(path: Path) -> None:
    torch.save(content(prompts=Hostile(f"touch {path.parent / 'ran'}")), path)


def legacy_command(path: Path) -> None:
    torch.save(Hostile(f"touch {path.parent / 'ran'}"), path, _use_new_zipfile_serialization=False)


def expanded(path: Path) -> None:
    """A tensor of a terabyte in a file of a kilobyte."""
    torch.save(of(key="k", tags={}, fields={"input_ids": torch.zeros(1).expand(1 << 38)}), path)


def repeated(path: Path) -> None:
    """The same bytes, a thousand times."""
    base = torch.zeros(1 << 16)
    torch.save(of(key="k", tags={}, fields={"x": [base.view(-1) for _ in range(1000)]}), path)


def compressed(path: Path) -> None:
    plain = path.with_name("plain")
    torch.save(of(key="k", tags={}, fields={"input_ids": torch.zeros(1 << 20)}), plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    plain.unlink()


def no_archive(path: Path) -> None:
    path.write_bytes(b"\x80\x04}.")


def cut_short(path: Path) -> None:
    torch.save(content(), path)
    path.write_bytes(path.read_bytes()[:-200])


def saved(made: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(made, path)


@pytest.mark.parametrize(
    "write",
    [
        command, legacy_command, expanded, repeated, compressed, no_archive, cut_short,
        saved(content(step=2)),
        saved(content(format=99)),
        saved([1, 2]),
        saved({"format": 1}),
        saved(content(raw_rewards=None)),
        saved(content(prompts=[{"uid": 3, "prompt": None, "rows": []}])),
        saved(of(key="k", tags=[], fields={})),
        saved(of(key="k", tags={}, fields={1: 2})),
        saved(of(key="k", tags={}, fields={"x": {1, 2}})),
        saved(of(key="k", tags={}, fields={"x": torch.eye(2).to_sparse()})),
        saved(torch.nn.Linear(1, 1)),
    ],
)  # fmt: skip
async def test_a_file_that_is_no_batch_is_refused(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / "debug_rollout_1.pt")
    with pytest.raises(BadDebugRollout, match=r"debug_rollout_1\.pt"):
        await load(tmp_path, 1)
    assert "ran" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (expanded, "has bytes for less"),
        (repeated, "larger than the file"),
        (compressed, "compressed entries"),
        (no_archive, "not a zip file"),
    ],
)
async def test_a_size_is_checked_before_it_is_believed(
    write: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    write(tmp_path / "debug_rollout_1.pt")
    with pytest.raises(BadDebugRollout, match=why):
        await load(tmp_path, 1)


async def test_the_file_that_those_are_made_from_is_fine(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "debug_rollout_1.pt")
    (row,) = (await load(tmp_path, 1)).rows
    assert row.fields["input_ids"].tolist() == [0, 1, 2, 3]


async def test_what_is_no_plain_data_is_not_saved(tmp_path: Path) -> None:
    row = SavedRow("k", {}, {"x": object()})
    with pytest.raises(TypeError, match="a object is no plain data"):
        await save(tmp_path, DebugRollout(1, (("u", None, (row,)),)))
    assert os.listdir(tmp_path) == []
