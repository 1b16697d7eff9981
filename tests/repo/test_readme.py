"""The code of the README and of the gateway's page runs; the commands that are named exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

README = ROOT / "README.md"

if not README.exists():
    pytest.skip("there is no README yet", allow_module_level=True)

TEXT = README.read_text()
PAGES = [TEXT, (ROOT / "docs" / "gateway.md").read_text()]
PYTHON = [
    code
    for page in PAGES
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
]


def test_there_is_code_to_run() -> None:
    assert PYTHON


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[0][:40])
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    quoted = re.findall(r"^```\w*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    quoted += re.findall(r"`([^`\n]+)`", TEXT)
    named = {target for code in quoted for target in re.findall(r"\bmake ([a-z]+)", code)}
    assert named, "the README names the commands to start with"
    assert named <= targets


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT)
    assert [link for link in links if not (ROOT / link).exists()] == []
