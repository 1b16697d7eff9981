"""Others come while a plane's store is down: its files are its own, and it goes on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane import session
from dataplane.errors import Unreachable
from dataplane.host import embedded
from dataplane.host.folders import sweep
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker, is_gone
from tests.kills.restarts import Restarts
from tests.kills.rows import check, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

KEYS = [f"k{i}" for i in range(8)]


def come_and_go(speaker: Speaker, settings: dict[str, Any], name: str) -> None:
    """Sweep, start a plane of this name, use it, and end it."""
    sweep(settings["runtime_dir"], settings["shm_dir"])
    with dataplane.init({"host": "embedded", **settings}, name=name) as client:
        client.kv_put("a", "p", tags={"by": "another"})
        speaker.say(client.plane_id)


def content(plane: Plane) -> dict[str, str]:
    """What every file of a plane holds, and which file it is."""
    found: dict[str, str] = {}
    for folder in (plane.folders.runtime, plane.folders.segments):
        for path in folder.rglob("*"):
            if path.is_file():
                text = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = f"{path.stat().st_ino} {text}"
    return found


@pytest.fixture
def down(restarts: Restarts, own_plane: Callable[..., Plane]) -> Iterator[Plane]:
    """A plane with rows whose process is dead, and is not started again until it may be."""
    plane = own_plane()
    put(plane.client, "p", KEYS)
    restarts.hold()
    pid = plane.pid
    plane.kill()
    eventually(lambda: is_gone(pid), "its process is dead")
    assert restarts.waiting.wait(10)
    yield plane
    session.close()


def comes_back(plane: Plane, restarts: Restarts, before: dict[str, str]) -> None:
    assert content(plane) == before
    restarts.go()
    check(plane.client, "p", KEYS)
    put(plane.client, "p", ["more"])
    check(plane.client, "p", [*KEYS, "more"])
    plane.client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks=0)


@pytest.mark.parametrize("who", ["this process", "another process"])
def test_a_second_plane_leaves_the_files_of_one_whose_store_is_down(
    down: Plane, restarts: Restarts, roots: dict[str, Path], who: str
) -> None:
    before = content(down)
    assert any("journal" in path for path in before)
    assert any("segment" in path for path in before)
    settings = {name: str(path) for name, path in roots.items()}
    if who == "this process":
        assert sweep(roots["runtime_dir"], roots["shm_dir"]) == []
        with dataplane.init({"host": "embedded", **settings}, name="another") as second:
            assert second.plane_id != down.joined.plane_id
            second.kv_put("a", "p", tags={})
    else:
        with Process(come_and_go, settings, "another") as other:
            assert other.says() != down.joined.plane_id
            assert other.ends() == 0
    comes_back(down, restarts, before)


def test_a_second_plane_with_another_runtime_folder_leaves_the_segments(
    down: Plane, restarts: Restarts, roots: dict[str, Path], tmp_path: Path
) -> None:
    """It knows of the first one only by its segments, which are in the same shared memory."""
    before = content(down)
    runtime = roots["runtime_dir"] / "elsewhere"
    assert sweep(runtime, roots["shm_dir"]) == []
    with Process(
        come_and_go, {"runtime_dir": str(runtime), "shm_dir": str(roots["shm_dir"])}, "another"
    ) as other:
        other.says()
        assert other.ends() == 0
    (runtime / "lock").unlink()
    runtime.rmdir()
    comes_back(down, restarts, before)


def test_who_starts_a_plane_of_the_same_name_joins_the_one_whose_store_is_down(
    down: Plane, restarts: Restarts, roots: dict[str, Path]
) -> None:
    before = content(down)
    settings = {"host": "embedded", "timeout_s": 0.5}
    settings |= {name: str(path) for name, path in roots.items()}
    with pytest.raises(Unreachable):
        dataplane.init(settings, name=down.joined.name)
    assert embedded.attach(down.joined.name, down.config) == down.joined
    assert content(down) == before
    restarts.go()
    with dataplane.init({**settings, "timeout_s": 20}, name=down.joined.name) as client:
        assert client.plane_id == down.joined.plane_id
        check(client, "p", KEYS)
    comes_back(down, restarts, content(down))
