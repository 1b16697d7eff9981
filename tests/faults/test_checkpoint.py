"""Checkpoints under full load, on full disks, and of savers that are killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch

from dataplane.checkpoint.verify import verify_checkpoint
from dataplane.client.core import Joined
from dataplane.client.effects import Ask
from dataplane.client.saving import save
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import InvalidRequest, QuotaExceeded, RequestError
from tests.deadline import eventually
from tests.faults.planes import SMALL_STORE, Plane
from tests.faults.processes import Process, Speaker
from tests.faults.raw import Raw
from tests.faults.test_hostile_requests import WRONG, wrong_bodies

pytestmark = pytest.mark.faults

ROWS = 100_000
BATCH = 1000
P = "train"

SLOW_S = 0.25
"""What 1 put in 100 may take at most here. The machine is shared: the aim is 20 ms, and what it
took is printed."""


# -- under load ------------------------------------------------------------------------------

State = dict[str, int]
"""The version of each key that is there; version and key make the rest."""


def value_of(key: str, version: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    number = int(key[1:])
    return np.arange(20 + number % 50, dtype=np.int32) + np.int32(number * 7 + version)


def tags_of(key: str, version: int) -> dict[str, Any]:
    number = int(key[1:])
    return {
        "uid": f"u{number // 8}", "index": number % 8, "version": version, "score": number / 7,
        "status": "completed", "ok": number % 3 == 0, "spans": [[version, number % 50]],
    }  # fmt: skip


def content_hash(rows: Iterator[tuple[str, dict[str, Any], bytes]]) -> str:
    """One number for all rows, in whatever order they come."""
    total = 0
    for key, tags, value in rows:
        text = json.dumps([key, sorted(tags.items())]).encode()
        total += int.from_bytes(hashlib.sha256(text + b"\0" + value).digest(), "big")
    return f"{total % (1 << 256):x}"


def of_model(state: State) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    for key, version in state.items():
        yield key, tags_of(key, version), value_of(key, version).tobytes()


def of_files(path: Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """The rows of the only partition, as docs/checkpoints.md says to read them."""
    (partition,) = json.loads((path / "manifest.json").read_text())["partitions"]
    tags = pq.read_table(path / partition["tags"]["name"])
    files = [pa.ipc.open_file(path / file["name"]).read_all() for file in partition["values"]]
    values = pa.concat_tables(files)["x"].combine_chunks()
    names = [name for name in tags.schema.names if name.startswith("tag.")]
    is_json = {name: bool(tags.schema.field(name).metadata) for name in names}
    columns = {name: tags[name].to_pylist() for name in names}
    numbers = values.values.to_numpy()
    ends = values.offsets.to_numpy()
    for i, key in enumerate(tags["key"].to_pylist()):
        found = {
            name[len("tag.") :]: json.loads(cell) if is_json[name] else cell
            for name in names
            if (cell := columns[name][i]) is not None
        }
        yield key, found, numbers[ends[i] : ends[i + 1]].tobytes()


def fill(client: Client) -> State:
    state = {f"k{i}": 0 for i in range(ROWS)}
    keys = list(state)
    for at in range(0, ROWS, BATCH):
        part = keys[at : at + BATCH]
        rows = [torch.from_numpy(value_of(key, 0)) for key in part]
        client.kv_batch_put(part, P, {"x": rows}, [tags_of(key, 0) for key in part])
    return state


Step = tuple[int, str, list[str], int]
"""The revision of an acknowledged change, put or clear, its keys and their version."""


def write_and_clear(speaker: Speaker, joined: Joined, config: Config, stop: Path) -> None:
    """Put, overwrite and clear rows as fast as it goes; at the end tell what was acknowledged, and
    how long each put took and when."""
    client = Client(joined, config)
    steps: list[Step] = []
    took: list[tuple[float, float]] = []
    fresh = itertools.count(ROWS)
    oldest = itertools.count()

    def put(key: str, version: int) -> None:
        value = {"x": torch.from_numpy(value_of(key, version))}
        tags = tags_of(key, version)
        started = time.perf_counter()
        meta = client.kv_put(key, P, value, tags)
        took.append((time.monotonic(), time.perf_counter() - started))
        assert meta.revision is not None
        steps.append((meta.revision.n, "put", [key], version))

    def clear(keys: list[str], where: dict[str, Any] | None = None) -> None:
        client.kv_clear(None if where else keys, P, where=where)
        steps.append((client.revision.n, "clear", keys, 0))

    speaker.say("ready")
    version = 0
    while not stop.exists():
        version += 1
        for _ in range(8):
            put(f"k{next(fresh)}", version)
            put(f"k{ROWS // 2 + (version * 37) % (ROWS // 2)}", version)
        clear([f"k{next(oldest)}" for _ in range(8)])
        if not version % 64:  # a whole prompt's, by its tag
            uid = version % (ROWS // 8)
            clear([f"k{8 * uid + i}" for i in range(8)], where={"uid": f"u{uid}"})
    speaker.say((steps, took))


def replay(state: State, steps: list[Step], up_to: int) -> State:
    """The rows of a revision, by all changes that were acknowledged up to it."""
    state = dict(state)
    for n, what, keys, version in steps:
        if n > up_to:
            continue
        for key in keys:
            if what == "put":
                state[key] = version
            else:
                state.pop(key, None)
    return state


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_of_100_000_rows_under_write_and_clear_load_is_of_one_moment(
    own_plane: Callable[..., Plane], tmp_path: Path
) -> None:
    plane = own_plane(capacity_bytes=2 << 30, timeout_s=60)
    before = fill(plane.client)
    stop = tmp_path / "stop"
    with Process(write_and_clear, plane.joined, plane.config, stop) as writer:
        assert writer.says() == "ready"
        saver = plane.another()
        started = time.monotonic()
        summary = saver.save_checkpoint(tmp_path / "saved")
        ended = time.monotonic()
        stop.touch()
        steps, took = writer.says(60.0)
    saver.close()

    n = summary["revision"].n
    assert min(step[0] for step in steps) < n + 1000  # it wrote from the start
    assert max(step[0] for step in steps) > n
    model = replay(before, steps, n)
    assert summary["rows"] == len(model)
    assert content_hash(of_files(tmp_path / "saved")) == content_hash(of_model(model))
    changed = replay(before, steps, max(step[0] for step in steps))
    assert changed != model

    seconds = np.array([seconds for at, seconds in took if started <= at <= ended])
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    worst = plane.client.status()["worst_slice_ms"]
    print(
        f"\n{len(model)} rows, {summary['bytes'] >> 20} MiB saved in {summary['seconds']:.2f} s; "
        f"meanwhile {len(seconds)} puts: p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
        f"max {seconds.max() * 1e3:.1f} ms; worst slice {worst:.2f} ms"
    )
    assert p99 < SLOW_S * 1e3

    # What was cleared before that moment is not there, in no plane that comes of it.
    restored = own_plane(capacity_bytes=2 << 30, timeout_s=60)
    started = time.monotonic()
    restored.client.load_checkpoint(tmp_path / "saved")
    print(f"loaded in {time.monotonic() - started:.2f} s")
    listing = restored.client.kv_list(P)
    assert set(listing.keys) == set(model)
    assert len(listing.keys) == len(model)
    keys = listing.keys[:: max(1, len(model) // 500)]
    got = restored.client.kv_batch_get(keys, P, layout="list")["x"]
    for key, row in zip(keys, got, strict=True):
        assert row.numpy().tobytes() == value_of(key, model[key]).tobytes()
    restored.client.kv_clear(None, P, where={})
    restored.comes_to(used_bytes=0, blocks=0)
    plane.client.kv_clear(None, P, where={})
    plane.comes_to(used_bytes=0, blocks=0)


def test_what_is_repacked_while_it_is_saved_is_read_where_it_was(
    own_plane: Callable[..., Plane], tmp_path: Path
) -> None:
    plane = own_plane(**SMALL_STORE)
    client = plane.client
    for i in range(5):
        rows = torch.full((10, 30_000), i, dtype=torch.float32) + torch.arange(10)[:, None]
        client.kv_batch_put([f"k{i}-{j}" for j in range(10)], "p", {"x": rows})
    for i in range(5):
        client.kv_clear([f"k{i}-{j}" for j in range(8)], "p")
    plane.comes_to(blocks=5)
    with plane.another() as saver:
        verb = save(saver._core, tmp_path / "saved", False, saver._deadline(None))
        moved: list[int] = []

        def steps() -> Iterator[Any]:
            effect = verb.send(None)
            while True:
                if type(effect) is Ask and effect.verb == "pin" and not moved:
                    # It knows where the rows are; now they are moved, to make room for this.
                    with pytest.raises(QuotaExceeded):
                        large = torch.zeros(900_000)
                        client.kv_put("large", "q", {"x": large}, timeout=2.0)
                    moved.append(plane.counts()["blocks"])
                    assert client.status()["dead_blocks"] >= 1
                try:
                    effect = verb.send((yield effect))
                except StopIteration:
                    return

        saver._drive(steps(), saver._deadline(None))
    assert moved[0] > 5  # the copies, and what they are copies of
    client.kv_put("large", "q", {"x": torch.zeros(900_000)})  # now there is room
    restored = own_plane(**SMALL_STORE)
    restored.client.load_checkpoint(tmp_path / "saved")
    keys = [f"k{i}-{j}" for i in range(5) for j in (8, 9)]
    assert restored.client.kv_list("p").keys == keys
    got = restored.client.kv_batch_get(keys, "p", layout="list")["x"]
    assert [row.unique().tolist() for row in got] == [[i + j] for i in range(5) for j in (8, 9)]


# -- the disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("what", ["values", "tags"])
def test_on_a_full_disk_the_earlier_checkpoint_is_intact(
    own_plane: Callable[..., Plane], small_disk: Path, what: str
) -> None:
    plane = own_plane()
    client = plane.client
    client.kv_put("a", "p", {"x": torch.zeros(1000)}, {"v": 1})
    path = small_disk / "saved"
    client.save_checkpoint(path)
    free = os.statvfs(small_disk).f_bavail
    if what == "values":
        client.kv_put("large", "p", {"x": torch.zeros(3 << 20)})
    else:
        for i in range(4):
            keys = [f"t{i}-{j}" for j in range(40)]
            client.kv_batch_put(keys, "p", None, [{"text": "x" * 60_000}] * 40)
    for _ in range(2):
        with pytest.raises(QuotaExceeded, match="the disk is full") as full:
            client.save_checkpoint(path, overwrite=True)
        assert full.value.limit_bytes == 8 << 20
        assert os.listdir(small_disk) == ["saved"]
        assert os.statvfs(small_disk).f_bavail == free
    assert verify_checkpoint(path)["rows"] == 1
    client.kv_clear(None, "p", where={"v": {"exists": False}})
    plane.comes_to(used_bytes=4096)  # no checkpoint holds what was cleared
    client.save_checkpoint(path, overwrite=True)
    assert verify_checkpoint(path)["revision"] == tuple(client.revision)


# -- killed savers and loaders ---------------------------------------------------------------


def save_and_stop(speaker: Speaker, joined: Joined, config: Config, path: Path, verb: str) -> None:
    """Save over what is there, and stop before the request `verb`, or before the end."""
    from dataplane.checkpoint.placing import Placing
    from dataplane.client.connection import Connection

    client = Client(joined, config)
    call, put_in_place = Connection.call, Placing._put_in_place

    def stopping(self: Connection, name: str, *arguments: Any) -> Any:
        if name == verb:
            speaker.stop_myself()
        return call(self, name, *arguments)

    def stopping_at_the_end(self: Placing) -> None:
        if verb == "rename":
            speaker.stop_myself()
        put_in_place(self)

    Connection.call = stopping
    Placing._put_in_place = stopping_at_the_end
    client.save_checkpoint(path, overwrite=True)
    speaker.say("done")


@pytest.mark.parametrize("verb", ["checkpoint_rows", "pin", "checkpoint_close", "rename"])
def test_a_saver_that_is_killed_leaves_the_old_checkpoint_and_no_bytes_in_use(
    own_plane: Callable[..., Plane], tmp_path: Path, verb: str
) -> None:
    plane = own_plane()
    client = plane.client
    path = tmp_path / "saved"
    client.kv_put("a", "p", {"x": torch.zeros(100)}, {"v": 1})
    old = client.save_checkpoint(path)["revision"]
    client.kv_put("a", "p", tags={"v": 2})
    with Process(save_and_stop, plane.joined, plane.config, path, verb) as saver:
        saver.stopped()
        client.kv_clear(["a"], "p")
        if verb == "rename":  # it holds nothing any more
            eventually(lambda: not client.status()["dead_blocks"], "the dead block is freed")
        else:
            for _ in range(20):
                assert client.status()["dead_blocks"] == 1
        saver.kill()
    eventually(lambda: not client.status()["dead_blocks"], "bytes are freed", within_s=15.0)
    plane.comes_to(used_bytes=0)
    assert verify_checkpoint(path)["revision"] == tuple(old)
    assert len(os.listdir(tmp_path)) == 2
    client.save_checkpoint(path, overwrite=True)
    assert verify_checkpoint(path)["rows"] == 0
    assert os.listdir(tmp_path) == ["saved"]


def load_and_stop(speaker: Speaker, joined: Joined, config: Config, path: Path, verb: str) -> None:
    """Load, and stop before the request `verb`."""
    from dataplane.client.connection import Connection

    client = Client(joined, config)
    call = Connection.call

    def stopping(self: Connection, name: str, *arguments: Any) -> Any:
        if name == verb:
            speaker.stop_myself()
        return call(self, name, *arguments)

    Connection.call = stopping
    client.load_checkpoint(path)
    speaker.say("done")


@pytest.mark.parametrize("verb", ["restore_rows", "commit", "restore_state", "restore_end"])
def test_a_loader_that_is_killed_leaves_the_plane_empty(
    own_plane: Callable[..., Plane], tmp_path: Path, verb: str
) -> None:
    source, target = own_plane(), own_plane()
    source.client.kv_put("a", "p", {"x": torch.zeros(100)}, {"v": 1})
    source.client.save_checkpoint(tmp_path / "saved")
    with Process(load_and_stop, target.joined, target.config, tmp_path / "saved", verb) as loader:
        loader.stopped()
        assert target.client.kv_list_partitions() == {}
        loader.kill()

    def loads() -> bool:
        try:
            target.client.load_checkpoint(tmp_path / "saved")
        except InvalidRequest as refused:
            return "another client is loading" not in str(refused)
        return True

    eventually(loads, "the load of the client that is gone is given up", within_s=15.0)
    assert target.client.kv_list("p").tags == [{"v": 1}]
    target.comes_to(used_bytes=4096, blocks=1)


# -- requests that no client of ours makes ---------------------------------------------------

GROUP = ["u", 3, 2, 0, "running", 3, 0.0, True, "c"]
NUMBER = (0).to_bytes(8, "little")
ONE_ROW = [
    0, ["u_0"], b"\x80", NUMBER, NUMBER, NUMBER, ["c"], b"\0" * 4, {"t": b"\1\0\0\0"},
]  # fmt: skip
TASK = {
    "task": "t", "last_id": 1, "closed": [], "batches": [], "forgotten": -1,
    "leases": [{
        "claim_id": 1, "revision": 1, "rows": [["u_0", 1]], "held": ["u_0"], "lost": {},
        "done": [], "holders": {"c": [1]}, "lease_s": 30.0, "grouped": False, "at": 0.0,
        "share": None,
    }],
}  # fmt: skip

RIGHT: list[tuple[str, list[Any]]] = [
    ("restore_partition", ["p", {"x": ["int8", 1, 0]}, False, [GROUP]]),
    ("restore_rows", ["p", *ONE_ROW]),
    ("restore_state", ["p", False, {"rows": 5}, {"versions": 1}, [TASK]]),
]


def test_a_load_of_wrong_types_is_refused_part_by_part_and_the_right_one_still_works(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    with Raw.greeted(plane.joined) as raw:
        raw.ask("restore_begin", ["r", 60.0, 1, 10, None])
        for verb, right in RIGHT:
            refused = 0
            for body in wrong_bodies(["r", *right]):
                if body == ["r", *right] or (type(body) is list and body[1:2] != right[:1]):
                    continue  # that makes, or is about, another partition
                try:
                    raw.ask(verb, body)
                except RequestError:  # anything else would be the server's fault
                    refused += 1
            assert refused > 50
            raw.ask(verb, ["r", *right])
        for where, wrong in inner_wrongs(TASK):
            raw.ask("restore_partition", ["r", f"q{where}", {}, False, []])
            raw.ask("restore_rows", ["r", f"q{where}", *ONE_ROW])
            try:
                raw.ask("restore_state", ["r", f"q{where}", False, None, None, [wrong]])
            except RequestError:
                pass
        raw.ask("restore_abort", ["r"])
        assert plane.client.kv_list_partitions() == {}
        raw.ask("restore_begin", ["r", 60.0, 1, 10, None])
        for verb, right in RIGHT:
            raw.ask(verb, ["r", *right])
        assert raw.ask("restore_end", ["r"]) == [2, 11]
    assert plane.client.kv_list("p").keys == ["u_0"]
    assert plane.client.kv_list_partitions()["p"]["quota"] == {"rows": 5}
    plane.client.kv_put("u_1", "p", {"x": torch.zeros(1, dtype=torch.int8)}, attempt=3)


def inner_wrongs(about: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """A task with each of its parts, and of its claim's parts, replaced by what they cannot be."""
    number = itertools.count()
    for name in about:
        for wrong in WRONG:
            yield next(number), {**about, name: wrong}
    (lease,) = about["leases"]
    for name in lease:
        for wrong in WRONG:
            yield next(number), {**about, "leases": [{**lease, name: wrong}]}
