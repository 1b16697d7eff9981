"""The restore drill of docs/recovery.md, and what a snapshot costs those who put meanwhile.

Both are for 100,000 keys; `FAULTS_DRILL_KEYS=1000000` tries them with a million.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.host import embedded
from dataplane.server.plane import JOURNAL
from tests.repo.tree import ROOT
from tests.soak.processes import bytes_under

KEYS = int(os.environ.get("FAULTS_DRILL_KEYS", "100000"))
BATCH = 65_536
BACK_S = 10.0 if KEYS <= 100_000 else 60.0
SLICE_MS = 20.0
"""The longest that one slice of a walk may hold the loop on a machine that does other things."""
DRILL = re.search(
    r"^```python\n(.*?)^```", (ROOT / "docs/recovery.md").read_text(), re.MULTILINE | re.DOTALL
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def folders() -> Iterator[dict[str, Path]]:
    """Where a plane may leave nothing. Short: a path of a unix socket has at most 107 bytes."""
    with (
        tempfile.TemporaryDirectory(prefix="dataplane-") as runtime,
        tempfile.TemporaryDirectory(prefix="dataplane-", dir="/dev/shm") as shm,
    ):
        yield {"runtime_dir": Path(runtime), "shm_dir": Path(shm)}
        assert sorted(os.listdir(runtime) + os.listdir(shm)) in ([], ["lock"])


def test_the_restore_drill(folders: dict[str, Path], tmp_path: Path) -> None:
    assert DRILL is not None
    script = tmp_path / "drill.py"
    script.write_text(DRILL[1])
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "DRILL_KEYS": str(KEYS), "TMPDIR": str(tmp_path),
        **{f"DATAPLANE_{name.upper()}": str(path) for name, path in folders.items()},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=800, env=environment, cwd=tmp_path,
    )  # fmt: skip
    print(f"{KEYS} keys\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert set(said) == {"journal", "save", "load", "snapshot"}
    for what in ("journal", "snapshot"):
        numbers = re.match(r"([\d.]+) s .*; (\d+) MiB before, (\d+) MiB after", said[what])
        assert numbers is not None, said
        seconds, before, after = map(float, numbers.groups())
        assert seconds < BACK_S, said
        assert after < 1.5 * before + 64, said


def test_puts_do_not_wait_for_a_snapshot(folders: dict[str, Path]) -> None:
    """It is due when all is there; from then on until it is written, puts are quick."""
    config = Config(snapshot_bytes=1 << 40, timeout_s=120, **folders)
    nbytes = _journal_bytes(config)
    config = config.model_copy(update={"snapshot_bytes": max(64 << 10, int(0.98 * nbytes))})
    host = embedded.start("drill", config)
    try:
        with Client(host.joined, config) as client:
            quiet = [_put(client, n) for n in range(2000)]
            fill(client)
            meanwhile: list[float] = []
            folder = host.folders.runtime / JOURNAL
            taken = threading.Event()
            deadline = time.monotonic() + 300.0
            while not taken.is_set():
                meanwhile.append(_put(client, len(meanwhile)))
                if len(meanwhile) % 50 == 0 and _has_snapshot(folder):
                    taken.set()
                assert time.monotonic() < deadline, "no snapshot was taken"
            worst = client.status()["worst_slice_ms"]
    finally:
        host.stop()
    before, during = _p99_ms(quiet), _p99_ms(meanwhile)
    print(
        f"{KEYS} keys: p99 of a put {before:.2f} ms before, {during:.2f} ms during the snapshot "
        f"({len(meanwhile)} puts in {sum(meanwhile):.1f} s, the longest took "
        f"{max(meanwhile) * 1e3:.1f} ms); worst slice {worst} ms"
    )
    assert worst < SLICE_MS
    assert during < 20 * before + 10.0


def fill(client: Client) -> None:
    """All the keys, in as few puts as can be."""
    for first in range(0, KEYS, BATCH):
        rows = range(first, min(first + BATCH, KEYS))
        tags = [{"uid": str(n // 8), "status": "completed", "score": n / 7} for n in rows]
        client.kv_batch_put([f"key-{n}" for n in rows], "train", tags=tags)


def _journal_bytes(config: Config) -> int:
    """How large the journal is with all the keys."""
    host = embedded.start("drill", config)
    try:
        with Client(host.joined, config) as client:
            fill(client)
            return bytes_under(host.folders.runtime / JOURNAL)[0]
    finally:
        host.stop()


def _put(client: Client, number: int) -> float:
    began = time.perf_counter()
    client.kv_put(f"put-{number % 100}", "puts", None, {"n": number})
    return time.perf_counter() - began


def _p99_ms(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))] * 1e3


def _has_snapshot(folder: Path) -> bool:
    return any(name.startswith("snapshot-") and "." not in name for name in os.listdir(folder))
