"""What is expected is no error: a plane and its gateway go through all of it, and no line says so.

Every line that their processes write is one object of JSON with the plane and the process in it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch

import dataplane
from dataplane.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidRequest,
    KeyNotFound,
    SchemaMismatch,
    StaleWrite,
    Unreachable,
)
from tests.deadline import eventually

COMMAND: Final = "from dataplane.cli.main import main; main()"
NAMES: Final = {"ts", "level", "logger", "event", "plane", "role", "pid"}

OF_KILLS: Final = ("the process of plane 'logged' ended", "the plane does not answer")

DYING: Final = """
import sys, dataplane, torch
client = dataplane.connect("logged", config={"host": "embedded", "runtime_dir": sys.argv[1]})
attempt = client.begin_group("dies", "train", n=2)
client.kv_put("dies_0_0", "train", {"x": torch.zeros(9)}, {"uid": "dies"}, attempt=attempt)
claim = client.kv_claim("train", "work", count=1, fields=["x"], lease_s=0.2)
print(claim.keys[0], flush=True)
sys.stdin.read()
"""


class Logged:
    """A process, and what it wrote to standard error."""

    def __init__(self, path: Path, *command: str) -> None:
        self.path = path
        with path.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def says(self) -> str:
        """Its next line of standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def lines(self) -> list[dict[str, Any]]:
        """What it logged; AssertionError if any line is no object of JSON."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def end(self) -> int:
        """Have it end by itself; its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def logged(path: Path, *command: str) -> Generator[Logged]:
    process = Logged(path, *command)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def served(roots: dict[str, Path], tmp_path: Path) -> Iterator[Logged]:
    """A plane of its own, as an operator starts it."""
    with logged(
        tmp_path / "plane.log", "serve", "--name", "logged", "--log-format", "json",
        "--log-level", "info", "--runtime-dir", str(roots["runtime_dir"]),
        "--shm-dir", str(roots["shm_dir"]),
    ) as process:  # fmt: skip
        assert "serves at" in process.says()
        yield process


def test_expected_events_are_no_errors(
    served: Logged, roots: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"host": "embedded"} | {key: str(path) for key, path in roots.items()}
    tokens = tmp_path / "tokens.json"
    made = subprocess.run(
        [sys.executable, "-c", COMMAND, "token", "create", "producer", "--file", str(tokens),
         "--partition", "*", "--role", "producer"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    listen = f"unix:{roots['runtime_dir'] / 'gate.sock'}"
    with (
        dataplane.connect("logged", config=settings) as client,
        logged(
            tmp_path / "gateway.log", "gateway", "--name", "logged", "--listen", listen,
            "--token-file", str(tokens), "--runtime-dir", settings["runtime_dir"],
            "--log-format", "json", "--log-level", "debug",
        ) as gateway,
    ):  # fmt: skip
        assert "listens at" in gateway.says()
        _consumers_that_die(client, settings["runtime_dir"])
        _refused_requests(client)
        _late_writes(client)
        _deadlines(client)
        _strangers(client)
        _tokens_that_do_not_hold(listen)
        _stores_that_are_killed(client)
        assert gateway.end() == 0
        told = gateway.lines()
    assert served.end() == 0
    told += served.lines()
    for line in told:
        assert set(line) >= NAMES, line
    bad = [line for line in told if line["level"] in ("error", "critical")]
    assert not bad, "\n".join(map(str, bad))
    # And no warning but of the kills, of which somebody may want to know.
    warned = [line["event"] for line in told if line["level"] == "warning"]
    assert [event for event in warned if not event.startswith(OF_KILLS)] == []
    assert sum("another one goes on" in event for event in warned) == 2
    assert {line["role"] for line in told} == {"supervisor", "stores", "gateway"}
    assert any("is served at" in line["event"] for line in told)
    secret = made.stdout.split()
    text = gateway.path.read_text() + served.path.read_text()
    assert not [word for word in secret if word.startswith("dpt_") and word in text]


def _consumers_that_die(client: dataplane.Client, runtime_dir: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DYING, runtime_dir],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as dying:  # fmt: skip
        assert dying.stdout is not None
        key = dying.stdout.readline().strip()
        dying.kill()
    again = client.kv_claim("train", "work", count=1, fields=["x"], lease_s=5, timeout=30)
    assert again.keys == [key]
    client.kv_clear(again.keys, "train")
    with pytest.raises(ClaimLost):
        client.kv_commit(again)


def _refused_requests(client: dataplane.Client) -> None:
    client.kv_put("a", "train", {"x": torch.zeros(3)})
    with pytest.raises(SchemaMismatch):
        client.kv_put("b", "train", {"x": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(InvalidRequest):
        client.kv_put("nowhere\n\x1b[31m", "train", {"x": torch.zeros(3)}, must_exist=True)
    with pytest.raises(KeyNotFound):
        client.kv_put("nowhere", "train", {"x": torch.zeros(3)}, must_exist=True)
    with pytest.raises(KeyNotFound):
        client.kv_batch_get(["nowhere"], "train")


def _late_writes(client: dataplane.Client) -> None:
    attempt = client.begin_group("late", "train", n=1)
    client.kv_clear(None, "train", where={"uid": "late"}, retire=True)
    with pytest.raises(StaleWrite):
        client.kv_put("late_0_0", "train", {"x": torch.zeros(3)}, attempt=attempt)


def _deadlines(client: dataplane.Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.kv_wait("train", {"status": "never"}, timeout=0.1)
    with pytest.raises(DeadlineExceeded):
        client.kv_claim("train", "work", count=99, timeout=0.1)


def _strangers(client: dataplane.Client) -> None:
    """Who speaks something else, says nothing, or goes away in the middle."""
    path = client._core.tags.unix
    assert path is not None
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"", os.urandom(4096)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect(path)
            with suppress(OSError):
                stranger.sendall(said)
                if said:
                    while stranger.recv(65536):
                        pass


def _tokens_that_do_not_hold(listen: str) -> None:
    with grpc.insecure_channel(listen) as channel:
        for metadata in ([], [("authorization", "Bearer dpt_aaaaaaaaaaaa_nonsense")]):
            call = channel.unary_unary("/dataplane.v1.DataPlaneService/List")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=metadata, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def _stores_that_are_killed(client: dataplane.Client) -> None:
    for _ in range(2):
        pid = client.status()["pid"]
        os.kill(pid, signal.SIGKILL)

        def is_back(before: int = pid) -> bool:
            try:
                return client.status(timeout=5)["pid"] != before
            except (Unreachable, DeadlineExceeded):
                return False

        eventually(is_back, "another process serves", within_s=60)
        assert client.kv_batch_get(["a"], "train").keys == ["a"]


def test_text_says_it_too(roots: dict[str, Path], tmp_path: Path) -> None:
    with logged(
        tmp_path / "plane.log", "serve", "--name", "text", "--log-level", "info",
        "--runtime-dir", str(roots["runtime_dir"]), "--shm-dir", str(roots["shm_dir"]),
    ) as process:  # fmt: skip
        assert "serves at" in process.says()
        assert process.end() == 0
    first = process.path.read_text().splitlines()[0]
    assert " INFO    dataplane.server [plane=text plane_id=" in first
    assert "role=stores" in first


@pytest.mark.parametrize("option", ["--log-level=loud", "--log-format=xml"])
def test_other_levels_and_forms_are_refused(option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "serve", option], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "is none of" in done.stderr
