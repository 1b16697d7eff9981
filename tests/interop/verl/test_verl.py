"""verl's V1 path, by the command of this folder, on both packages named `transfer_queue`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.sides import SIDES

ROOT = Path(__file__).resolve().parents[3]


def _here() -> bool:
    return "VERL" in os.environ or importlib.util.find_spec("verl") is not None


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.interop.verl", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_a_folder_without_verl_is_refused(tmp_path: Path) -> None:
    ran = _command("--verl", str(tmp_path))
    assert ran.returncode == 2
    assert f"{tmp_path} has no package `verl` in it" in ran.stderr


@pytest.mark.transferqueue
@pytest.mark.slow
@pytest.mark.skipif(not _here(), reason="verl is not here: `make interop` installs it")
@pytest.mark.parametrize("side", SIDES)
def test_verl_trains_samples_evicts_and_restarts(side: str) -> None:
    if side == "peer" and importlib.util.find_spec("transfer_queue") is None:
        pytest.skip("TransferQueue is not installed (extra `bench`)")
    ran = _command("--against", side)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all as expected" in ran.stdout
