"""A run that is killed and resumed ends with the weights of one that was left alone, bit for bit.

Each kill takes the whole process group, at a moment that is seen from outside, in the plane or in
the run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane import Client, DataplaneError
from tests.deadline import eventually
from tests.trainer.runs import write_run

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
START_S = 120.0
STEPS = 4
TRIES = 4


def start(file: Path, *options: str) -> subprocess.Popen[bytes]:
    """A run in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.run", "run", str(file), *options],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def ended(run: subprocess.Popen[bytes]) -> None:
    _, said = run.communicate(timeout=240)
    assert run.returncode == 0, said[-3000:].decode(errors="replace")


def kill(run: subprocess.Popen[bytes]) -> None:
    assert run.poll() is None, "the run ended before its moment came"
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)


def digest(folder: Path) -> str:
    """Of the weights that the run exported last."""
    file = folder / "run" / "hf" / f"hf-step-{STEPS}" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def short_folder() -> Generator[Path]:
    """A folder of a name that sockets in it can have."""
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        yield Path(folder)


def settings_of(folder: Path) -> Path:
    return write_run(folder, train__total_train_steps=STEPS)


class Missed(Exception):
    """The run was over before its moment was seen: steps of this size take a blink."""


class Watcher:
    """Looks at a run from outside. Its ways of looking raise Missed once the run is over."""

    def __init__(self, folder: Path, run: subprocess.Popen[bytes]) -> None:
        self.run = run
        self.partials = folder / "run" / "checkpoints"
        settings: dict[str, Any] = {
            "host": "embedded", "runtime_dir": str(folder / "planes"), "timeout_s": 60.0,
        }  # fmt: skip

        def join() -> Client | None:
            if run.poll() is not None:
                raise Missed("it was looked at")
            try:
                return dataplane.connect(f"small-{run.pid}", config=settings)
            except DataplaneError:
                return None

        joined = eventually(join, "the run's plane is there", within_s=START_S)
        assert joined is not None
        self.client = joined

    def close(self) -> None:
        self.client.close()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if self.run.poll() is not None:
                raise Missed(what)
            assert time.monotonic() < deadline, f"not in {START_S:g} s: {what}"

    def rows(self, step: int) -> list[tuple[frozenset[str], dict[str, Any]]]:
        """Fields and tags of the trajectories of a step."""
        try:
            found = self.client.kv_list(
                "train", where={"global_steps": step, "is_prompt": {"exists": False}}
            )
        except dataplane.PartitionNotFound:
            return []
        except dataplane.PlaneLost as error:
            raise Missed("its plane was looked at") from error
        return [(frozenset(f), dict(t)) for f, t in zip(found.fields, found.tags, strict=True)]


def mid_rollout(watcher: Watcher, step: int) -> None:
    watcher.until(lambda: watcher.rows(step), f"trajectories of step {step} are there")
    assert not any("old_logprobs" in fields for fields, _ in watcher.rows(step))


def mid_step(watcher: Watcher, step: int) -> None:
    """After an acknowledged write-back, before the commit: rows are there with what was written."""
    watcher.until(
        lambda: any("old_logprobs" in fields for fields, _ in watcher.rows(step)),
        f"log-probs of step {step} are written back",
    )


def mid_checkpoint(watcher: Watcher, step: int) -> None:
    def partial() -> bool:
        return any(watcher.partials.glob(f"ckpt-step-{step}.partial-*"))

    watcher.until(partial, f"checkpoint {step} is being written")


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What a run ends with that nobody disturbs."""
    with short_folder() as folder:
        ended(start(settings_of(folder)))
        return digest(folder)


@pytest.mark.parametrize("moment", [mid_rollout, mid_step, mid_checkpoint])
def test_a_killed_run_that_is_resumed_ends_with_the_same_weights(
    moment: Callable[[Watcher, int], None], undisturbed: str
) -> None:
    for left in reversed(range(TRIES)):
        with short_folder() as folder:
            try:
                killed_and_resumed(folder, moment)
            except Missed:
                assert left, f"the moment was missed {TRIES} times"
                continue
            assert digest(folder) == undisturbed
            summary = json.loads((folder / "run" / "summary.json").read_text())
            assert (summary["steps"], summary["rows_left"]) == (STEPS, 0)
            assert not list((folder / "run" / "checkpoints").glob("*.partial-*"))
            return


def killed_and_resumed(folder: Path, moment: Callable[[Watcher, int], None]) -> None:
    file = settings_of(folder)
    step = random.Random(moment.__name__).randint(2, STEPS - 1)
    run = start(file)
    try:
        watcher = Watcher(folder, run)
        try:
            moment(watcher, step)
            kill(run)
        finally:
            watcher.close()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        if run.stderr is not None and not run.stderr.closed:
            run.communicate(timeout=60)
    ended(start(file, "--resume"))
