"""Files of a live plane that are not as they were written: found, named, and never served."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

import dataplane
from dataplane.checkpoint.verify import verify_checkpoint
from dataplane.cli.main import app
from dataplane.client.sync import Client
from dataplane.errors import CheckpointDamaged, DataplaneError, JournalDamaged, PlaneLost
from dataplane.host.folders import KEPT, sweep
from dataplane.tags.journal_folder import list_files
from dataplane.tags.records import framed
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import is_gone
from tests.kills.restarts import Restarts
from tests.kills.rows import check, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

TRIALS = (0, 1, 2)
KEYS = [f"k{i}" for i in range(20)]


def flip(path: Path, chance: random.Random, first: int, last: int) -> int:
    """Flip one bit of a file between two offsets; which byte."""
    at = chance.randrange(first, last)
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return at


def cut(path: Path, chance: random.Random) -> int:
    """Cut off the last bytes of a file; where it ends now."""
    size = path.stat().st_size - chance.randrange(1, 100)
    os.truncate(path, size)
    return size


def filled(plane: Plane) -> Path:
    """The journal of a plane in which there are a snapshot and a file after it."""
    client, journal = plane.client, plane.folders.runtime / "journal"
    put(client, "p", KEYS, 2000)
    client.kv_batch_put(KEYS, "p", tags=[{"text": "x" * 5000}] * len(KEYS))
    eventually(lambda: list_files(journal).snapshots, "a snapshot is taken", within_s=20)
    put(client, "p", [f"late{i}" for i in range(20)], 2000)
    return journal


def verified(path: Path) -> tuple[int, str]:
    """The exit status of `dataplane verify`, and what it says."""
    done = CliRunner().invoke(app, ["verify", str(path)])
    error = str(done.exception) if isinstance(done.exception, DataplaneError) else ""
    return done.exit_code, done.output + error


@contextmanager
def kept(plane: Plane) -> Generator[Path]:
    """What stays of a plane that is given up, which is removed at the end."""
    assert plane.host is not None
    host = plane.host
    eventually(lambda: host.ended, "its parent gives it up")
    try:
        yield plane.folders.runtime
    finally:
        shutil.rmtree(plane.folders.runtime)


def refused(plane: Plane, path: Path) -> None:
    """The plane is not served, clients are told why, and nothing but its segments is removed."""
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    plane.kill()
    with kept(plane) as runtime:
        for _ in range(2):
            with pytest.raises(PlaneLost) as lost:
                plane.client.kv_list("p")
            assert str(path) in str(lost.value)
        with plane.another() as other, pytest.raises(PlaneLost, match=path.name):
            other.kv_put("a", "p", tags={})
        assert str(path) in (runtime / KEPT).read_text()
        assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
        eventually(lambda: not plane.folders.segments.exists(), "its segments are gone")
        # Nobody takes it away, nor goes on from it.
        sweep(plane.config.runtime_dir, plane.config.shm_dir)
        assert path.exists()
        status, said = verified(runtime)
        assert status == 1
        assert str(path) in said


@pytest.mark.parametrize(
    ("what", "trial"),
    [
        *itertools.product(["head", "middle", "snapshot", "cut snapshot"], TRIALS),
        ("missing", 0),  # there is no chance in it
    ],
)
def test_a_journal_that_is_not_as_it_was_written_is_not_served(
    own_plane: Callable[..., Plane], seed: int, what: str, trial: int
) -> None:
    chance = random.Random(seed + trial)
    plane = own_plane(snapshot_bytes=64 << 10)
    journal = filled(plane)
    files = list_files(journal)
    newest = files.snapshots[files.snapshot]
    last = files.journals[max(files.journals)]
    path = newest if "snapshot" in what else last
    size = path.stat().st_size
    at: int | None = None
    if what == "head":
        at = flip(path, chance, 0, 40)
    elif what == "middle":
        at = flip(path, chance, 40, size - 1000)
    elif what == "snapshot":
        at = flip(path, chance, 0, size)
    elif what == "cut snapshot":
        cut(path, chance)
    else:
        path.rename(path.with_name("elsewhere"))
    if what == "missing":
        plane.kill()
        with kept(plane) as runtime:
            with pytest.raises(PlaneLost) as lost:
                plane.client.kv_list("p")
            assert str(path) in str(lost.value)
            assert verified(runtime)[0] == 1
        return
    status, said = verified(plane.folders.runtime)
    assert status == 1
    assert str(path) in said
    if at is not None:
        assert "offset" in said or "byte" in said
    refused(plane, path)


@pytest.mark.parametrize("trial", TRIALS)
def test_a_torn_tail_is_cut_off_and_all_that_was_acknowledged_is_served(
    own_plane: Callable[..., Plane], restarts: Restarts, seed: int, trial: int
) -> None:
    """What a process that dies in a write leaves behind: a part of a record."""
    chance = random.Random(seed + trial)
    plane = own_plane(snapshot_bytes=64 << 10)
    journal = filled(plane)
    restarts.hold()
    pid = plane.pid
    plane.kill()
    eventually(lambda: is_gone(pid), "it is dead")
    files = list_files(journal)
    path = files.journals[max(files.journals)]
    whole = path.read_bytes()
    # A record that ends before its end, or room for one that the file system had made.
    torn = chance.randrange(1, 60)
    record = framed(msgpack.packb((1, 10**6, time.time(), "what nobody was told of " * 10)))
    path.write_bytes(whole + (b"\0" * torn if trial == 0 else record[:torn]))
    status, said = verified(plane.folders.runtime)
    assert status == 1
    assert f"the last {torn} are no whole record" in said
    restarts.go()
    there = plane.client.kv_list("p").keys
    assert sorted(there) == sorted([*KEYS, *(f"late{i}" for i in range(20))])
    plane.client.kv_put("more", "p", tags={"n": 1})
    assert verified(plane.folders.runtime)[0] == 0
    plane.client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks=0)


def test_a_flipped_bit_in_the_last_record_is_no_torn_tail(
    own_plane: Callable[..., Plane], seed: int
) -> None:
    plane = own_plane()
    put(plane.client, "p", KEYS, 2000)
    path = plane.folders.runtime / "journal" / "journal-00000001"
    size = path.stat().st_size
    flip(path, random.Random(seed), size - 20, size)
    plane.kill()
    assert plane.host is not None
    host = plane.host
    try:
        eventually(lambda: host.ended, "its parent gives it up", within_s=4)
    finally:
        if host.ended:
            shutil.rmtree(plane.folders.runtime)


# -- under Ray -----------------------------------------------------------------------------------


@pytest.mark.ray
def test_a_damaged_journal_under_ray_is_said_to_whoever_joins_and_is_not_tried_for_ever(
    roots: dict[str, Path], ray_cluster: list[str], seed: int
) -> None:
    import ray

    settings: dict[str, Any] = {name: str(path) for name, path in roots.items()}
    settings |= {"host": "ray", "timeout_s": 10.0, "linger_s": 60.0, "start_timeout_s": 30.0}
    client: Client = dataplane.init(settings, name="damaged")
    runtime = roots["runtime_dir"] / client.plane_id
    try:
        put(client, "p", KEYS, 2000)
        pid = client.status()["pid"]
        path = runtime / "journal" / "journal-00000001"
        flip(path, random.Random(seed), 40, path.stat().st_size - 1000)
        os.kill(pid, 9)
        eventually(lambda: is_gone(pid), "the tag store is dead")
        with pytest.raises((JournalDamaged, PlaneLost)) as said:
            dataplane.connect("damaged", config=settings)
        assert str(path) in str(said.value)
        began = eventually(lambda: (runtime / KEPT).exists(), "it is kept")
        assert began
        with pytest.raises(PlaneLost):
            client.kv_list("p")

        def actors() -> list[str]:
            found: Any = ray.util.list_named_actors(all_namespaces=True)
            return [a["name"] for a in found if a["name"].startswith("damaged/")]

        eventually(lambda: not actors(), "nobody tries again", within_s=30)
        status, text = verified(runtime)
        assert status == 1
        assert str(path) in text
        eventually(lambda: not os.listdir(roots["shm_dir"]), "its segments are gone")
    finally:
        client.close(destroy=True)
        dataplane.close()
        shutil.rmtree(runtime, ignore_errors=True)


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("trial", TRIALS)
def test_a_checkpoint_that_is_not_as_it_was_saved_is_named_and_not_loaded(
    own_plane: Callable[..., Plane], tmp_path: Path, seed: int, how: str, trial: int
) -> None:
    """Each file of it in turn; a plane that died since says the same."""
    chance = random.Random(seed + trial)
    plane = own_plane()
    put(plane.client, "p", KEYS, 3000)
    saved = tmp_path / "saved"
    plane.client.save_checkpoint(saved)
    assert verified(saved)[0] == 0
    plane.client.kv_drop_partition("p")
    plane.kill()
    names = sorted(path.name for path in saved.rglob("*") if path.is_file())
    assert len(names) >= 4
    for name in names:
        damaged = tmp_path / "damaged"
        shutil.copytree(saved, damaged)
        path = damaged / name
        if how == "flipped":
            flip(path, chance, 0, path.stat().st_size)
        else:
            os.truncate(path, path.stat().st_size - chance.randrange(1, 60))
        status, said = verified(damaged)
        assert status == 1, name
        assert name in said
        with pytest.raises(CheckpointDamaged) as wrong:
            plane.client.load_checkpoint(damaged)
        assert wrong.value.path == str(damaged)
        assert plane.client.kv_list_partitions() == {}
        shutil.rmtree(damaged)
    assert verify_checkpoint(saved)["rows"] == len(KEYS)
    plane.client.load_checkpoint(saved)
    check(plane.client, "p", KEYS)
