"""Targets fuzzed one after the other, each in a fork of this process, and what came of each."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.fuzz.child import TIMEOUT_S, Stint, fuzz
from tests.fuzz.target import Target

FAILED: Final = Path(__file__).parent / "failed"
"""Inputs that once were a finding, by target; each is replayed by the tests."""

_STAT = re.compile(r"stat::(\w+):\s+(\d+)")
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


@dataclass(frozen=True)
class Outcome:
    """What came of fuzzing one target."""

    target: str
    runs: int
    runs_per_s: int
    coverage: int
    features: int
    corpus: int
    highest_bytes: int
    """The most that one input took of memory."""
    seconds: float
    found: tuple[Path, ...] = ()
    """Inputs that are findings, where they were kept."""
    said: str = ""
    """Why it ended, where it did not end well."""

    @property
    def is_well(self) -> bool:
        """Whether nothing was found."""
        return not self.found and not self.said

    def line(self) -> str:
        """All of it in a line."""
        text = (
            f"{self.target:22} {self.runs:>9} runs {self.runs_per_s:>6}/s  cov {self.coverage:>5}  "
            f"features {self.features:>6}  corpus {self.corpus:>5}  "
            f"highest {self.highest_bytes / (1 << 20):6.1f} MiB  {self.seconds:6.1f} s"
        )
        return text if self.is_well else f"{text}  FOUND {', '.join(map(str, self.found))}"


def run_target(
    target: Target,
    atheris: Any,
    *,
    seed: int,
    runs: int = 0,
    seconds: int = 0,
    failed: Path = FAILED,
    corpus: Path | None = None,
) -> Outcome:
    """Fuzz a target for so many runs, or seconds. Findings are copied to `failed`."""
    with _folder() as folder:
        for name in ("corpus", "seeds", "artifacts"):
            (folder / name).mkdir()
        if corpus is not None:
            (corpus / target.name).mkdir(parents=True, exist_ok=True)
        for data in (*target.seeds(), *kept(target.name)):
            (folder / "seeds" / _name(data)).write_bytes(data[: target.max_len])
        stint = Stint(
            seed, runs, seconds, (folder / "corpus") if corpus is None else corpus / target.name,
            folder / "seeds", folder / "artifacts", folder / "log",
        )  # fmt: skip
        began = time.monotonic()
        status = _forked(target, stint, atheris)
        took = time.monotonic() - began
        return _outcome(target, stint, status, took, failed)


def kept(name: str, failed: Path = FAILED) -> Iterator[bytes]:
    """The inputs of a target that once were findings."""
    if (failed / name).is_dir():
        for path in sorted((failed / name).iterdir()):
            yield path.read_bytes()


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _forked(target: Target, stint: Stint, atheris: Any) -> int:
    pid = os.fork()
    if not pid:
        try:
            fuzz(target, stint, atheris)
        finally:
            # C's own exit: libFuzzer keeps the input there. What this process would do at its end,
            # such as to remove the folder, is the parent's.
            ctypes.CDLL(None).exit(70)
    deadline = time.monotonic() + stint.seconds + 10 * TIMEOUT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.02)


def _outcome(target: Target, stint: Stint, status: int, took: float, failed: Path) -> Outcome:
    log = stint.log.read_text(errors="replace") if stint.log.exists() else ""
    found: list[Path] = []
    for path in sorted(stint.artifacts.glob("*-*")):
        data = path.read_bytes()
        keep = failed / target.name / _name(data)
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_bytes(data)
        found.append(keep)
    stats = {name: int(value) for name, value in _STAT.findall(log)}
    coverage, features, corpus = map(int, (_COVERAGE.findall(log) or [(0, 0, 0)])[-1])
    highest = stint.artifacts / "highest"
    runs = stats.get("number_of_executed_units", 0)
    return Outcome(
        target.name,
        runs,
        int(runs / took) if took else 0,
        coverage,
        features,
        corpus,
        int(highest.read_text()) if highest.exists() else 0,
        took,
        tuple(found),
        "" if status == 0 else f"exit status {status}:\n{_why(log)}",
    )


def _why(log: str) -> str:
    """The part of what libFuzzer said that says what went wrong."""
    at = max(log.find("=== Uncaught"), 0)
    return log[at : at + 6000] if at else log[-6000:]
