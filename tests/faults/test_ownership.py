"""Whose a plane is: it ends with its owner, leaves nothing, and is never swept while it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import session
from dataplane.errors import DeadlineExceeded, PlaneLost
from dataplane.host import embedded
from dataplane.host.folders import sweep
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker, is_gone, state_of

pytestmark = pytest.mark.faults

ROW = {"x": torch.tensor([1, 2, 3])}
LARGE = {"x": torch.arange(100_000)}


def own_a_plane(speaker: Speaker, settings: dict[str, Any], forks: bool) -> None:
    """Start a plane, use it, and wait; with `forks`, a forked child waits beside."""
    client = dataplane.init(settings, name="owned")
    client.kv_put("A", "p", LARGE)
    child = os.fork() if forks else -1
    if not child:
        signal.pause()
    server = next(iter(embedded._hosts)).pid
    speaker.say((server, client.plane_id, child))
    if speaker.hear() == "return":
        return
    signal.pause()


def folders_of(roots: dict[str, Path]) -> list[str]:
    """Names of the planes' folders that are there."""
    return sorted(name for root in roots.values() for name in os.listdir(root) if name != "lock")


@pytest.fixture
def settings(roots: dict[str, Path]) -> Generator[dict[str, Any]]:
    # Embedded also where the suite has initialised Ray in this process.
    yield {"host": "embedded", **{name: str(path) for name, path in roots.items()}}
    session.close()
    sweep(root=roots["runtime_dir"], shm_root=roots["shm_dir"])


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with-a-forked-child"])
def test_a_plane_ends_with_its_killed_parent_and_leaves_nothing(
    roots: dict[str, Path], settings: dict[str, Any], forks: bool
) -> None:
    with Process(own_a_plane, settings, forks) as owner:
        server, _, child = owner.says()
        try:
            assert len(folders_of(roots)) == 2
            owner.kill()
            eventually(lambda: is_gone(server), "the plane's process ends")
            assert folders_of(roots) == []
            assert not forks or not is_gone(child)
        finally:
            if forks:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["return", "signal"])
def test_a_plane_ends_with_a_parent_that_never_closed_it(
    roots: dict[str, Path], settings: dict[str, Any], ending: str
) -> None:
    with Process(own_a_plane, settings, False) as owner:
        server, _, _ = owner.says()
        owner.hears(ending)
        if ending == "signal":
            owner.signal(signal.SIGTERM)
        owner.ends()
        eventually(lambda: is_gone(server), "the plane's process ends")
    assert folders_of(roots) == []


def test_what_a_plane_left_that_was_killed_with_its_parent_is_swept_by_the_next_start(
    roots: dict[str, Path], settings: dict[str, Any], own_plane: Callable[..., Plane]
) -> None:
    live = own_plane()
    live.client.kv_put("A", "p", LARGE)
    with Process(own_a_plane, settings, False) as owner:
        server, plane_id, _ = owner.says()
        owner.stop()  # it could still notice the end of its child and clean up
        os.kill(server, signal.SIGKILL)
        eventually(lambda: is_gone(server), "the plane's process is dead")
        owner.kill()
    left = [name for name in folders_of(roots) if plane_id in name]
    assert len(left) == 2
    assert (roots["runtime_dir"] / plane_id / "plane.json").exists()
    with pytest.raises(PlaneLost, match="no plane 'owned' runs"):
        dataplane.connect("owned", config=settings)
    with dataplane.init(settings, name="owned") as again:
        assert again.plane_id != plane_id
        assert [name for name in folders_of(roots) if plane_id in name] == []
        assert live.reads("A", "p") == list(range(100_000))


@pytest.mark.parametrize("state", ["S", "T"], ids=["serving", "stopped"])
def test_a_live_plane_is_never_swept(
    roots: dict[str, Path], settings: dict[str, Any], own_plane: Callable[..., Plane], state: str
) -> None:
    live = own_plane()
    live.client.kv_put("A", "p", LARGE)
    inodes = live.segments()
    if state == "T":
        os.kill(live.pid, signal.SIGSTOP)
        eventually(lambda: state_of(live.pid) == "T", "the plane is stopped")
    try:
        assert sweep(roots["runtime_dir"], roots["shm_dir"]) == []
        with dataplane.init(settings, name="another") as other:
            assert other.plane_id != live.joined.plane_id
            other.kv_put("A", "p", ROW)
    finally:
        os.kill(live.pid, signal.SIGCONT)
    assert live.segments() == inodes
    assert live.reads("A", "p") == list(range(100_000))
    with live.another() as late:
        late.kv_put("B", "p", LARGE)


def test_a_second_start_under_the_same_name_attaches(
    settings: dict[str, Any], own_plane: Callable[..., Plane]
) -> None:
    live = own_plane()
    live.client.kv_put("A", "p", LARGE)
    with dataplane.init(settings, name="own-1") as second:
        assert second.plane_id == live.joined.plane_id
        assert second.kv_list("p").keys == ["A"]
    # What attached does not end what it did not start.
    live.client.kv_put("B", "p", ROW)


def test_a_plane_that_was_lost_can_be_started_anew_under_its_name(
    settings: dict[str, Any], own_plane: Callable[..., Plane]
) -> None:
    first = own_plane()
    first.lose()
    with dataplane.init(settings, name="own-1") as second:
        assert second.plane_id != first.joined.plane_id
        second.kv_put("A", "p", ROW)
        with pytest.raises(PlaneLost):
            first.client.kv_list("p")


def test_an_interrupt_of_the_terminal_does_not_end_the_plane_before_its_parent(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    plane.client.kv_put("A", "p", ROW)
    os.kill(plane.pid, signal.SIGINT)
    for _ in range(3):
        assert plane.client.kv_list("p").keys == ["A"]
    with plane.another() as late:
        assert late.kv_list("p").keys == ["A"]


def test_a_start_that_misses_its_deadline_leaves_nothing_and_may_be_repeated(
    roots: dict[str, Path], settings: dict[str, Any]
) -> None:
    with pytest.raises(DeadlineExceeded, match=r"within 0.01 s") as late:
        dataplane.init({**settings, "start_timeout_s": 0.01}, name="late")
    assert late.value.waited_s == 0.01
    assert folders_of(roots) == []
    with dataplane.init(settings, name="late") as client:
        client.kv_put("A", "p", ROW)


def test_a_forked_child_warns_of_nothing_and_ends_nothing(settings: dict[str, Any]) -> None:
    script = f"""
import gc, os, dataplane
client = dataplane.init({settings!r}, name="forked")
client.kv_put("A", "p", None, {{"n": 1}})
child = os.fork()
if not child:
    gc.collect()
    client.kv_put("B", "p", None, {{"n": 2}})
    client.close()
    dataplane.close()
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
assert client.kv_list("p").keys == ["A", "B"]
client.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- `dataplane serve` -----------------------------------------------------------------------


@pytest.fixture
def served(settings: dict[str, Any]) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A plane that runs until it is signalled, and what it said when it was up."""
    command = [sys.executable, "-c", "from dataplane.cli.main import main; main()"]
    process = subprocess.Popen(
        [
            *command, "serve", "--name", "served",
            "--runtime-dir", settings["runtime_dir"], "--shm-dir", settings["shm_dir"],
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    yield process, process.stdout.readline()
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_plane_runs_until_it_is_signalled_and_leaves_nothing(
    roots: dict[str, Path],
    settings: dict[str, Any],
    served: tuple[subprocess.Popen[str], str],
    number: signal.Signals,
) -> None:
    process, said = served
    (unix,) = [word for word in said.split() if word.startswith("unix:")]
    with (
        dataplane.connect("served", config=settings) as by_name,
        dataplane.connect(address=unix, config=settings) as by_socket,
        dataplane.connect(
            address=os.path.dirname(unix.removeprefix("unix:")), config=settings
        ) as by_folder,
    ):
        assert by_name.plane_id in said
        assert by_name.plane_id == by_socket.plane_id == by_folder.plane_id
        by_name.kv_put("A", "p", LARGE)
        with by_socket.kv_view(["A"], "p", layout="list") as rows:
            tensor = rows.fields["x"][0]
        # Clients come and go; it stays.
    with dataplane.connect("served", config=settings) as late:
        assert late.kv_list("p").keys == ["A"]
        process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert folders_of(roots) == []
        with pytest.raises(PlaneLost):
            late.kv_list("p")
    assert torch.equal(tensor, LARGE["x"])  # what was looked at stays as long as it is


def test_an_address_where_nothing_is_served_is_a_lost_plane(
    settings: dict[str, Any], roots: dict[str, Path]
) -> None:
    for address in (
        "unix:" + str(roots["runtime_dir"] / ("0" * 16) / "plane.sock"),
        str(roots["runtime_dir"] / ("0" * 16)),
    ):
        with pytest.raises(PlaneLost):
            dataplane.connect(address=address, config=settings)
