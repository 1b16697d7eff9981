"""What deploy/README.md has an operator type is typed at a live plane; `...` is anything."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY
from tests.repo.tree import ROOT

PAGE = (DEPLOY / "README.md").read_text()
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
BEFORE, WALK = PAGE.split("## A first-time operator's walk")


def _typed(text: str) -> list[tuple[str, str]]:
    return [pair for block in BLOCK.findall(text) for pair in TYPED.findall(block)]


@pytest.fixture
def environment(tmp_path: Path, runtime_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of a shell beside a plane that `dataplane serve` serves."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("dataplane", "-m dataplane.cli.main"), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DATAPLANE_RUNTIME_DIR": str(runtime_dir / "walk"),
        "DATAPLANE_CAPACITY_BYTES": str(32 << 20),
        "COLUMNS": "80",
    }
    environment.pop("RAY_ADDRESS", None)
    serving = subprocess.Popen(
        ["dataplane", "serve"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert "serves at" in serving.stdout.readline()
        yield environment
    finally:
        serving.terminate()
        serving.communicate(timeout=30)
        shutil.rmtree(runtime_dir / "walk", ignore_errors=True)


def _run(command: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    if not command.startswith("python producer.py"):  # which ends as if it were killed
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


def _differences(text: str, environment: dict[str, str], folder: Path) -> list[str]:
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    wrong: list[str] = []
    for command, wanted in _typed(text):
        said = _run(command, environment, folder)
        if not checker.check_output(wanted, said, flags):
            wrong.append(f"$ {command}\n{said}")
    return wrong


def test_the_walk(environment: dict[str, str], tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", WALK, re.MULTILINE | re.DOTALL)
    (tmp_path / "producer.py").write_text(program)
    commands = [command for command, _ in _typed(WALK)]
    for verb in ("why", "trace", "clear"):
        assert any(command.startswith(f"dataplane {verb} ") for command in commands)
    wrong = _differences(WALK, environment, tmp_path)
    assert not wrong, "\n\n".join(wrong)


def test_tokens_are_changed_as_it_says(environment: dict[str, str], tmp_path: Path) -> None:
    wrong = _differences(BEFORE, environment, tmp_path)
    assert not wrong, "\n\n".join(wrong)


def test_the_table_of_ports_is_that_of_the_manifests() -> None:
    head = (DEPLOY / "kuberay" / "base" / "raycluster.yaml").read_text()
    ports = set(re.findall(r"containerPort: (\d+)", head))
    compose = (DEPLOY / "compose.yaml").read_text()
    ports |= set(re.findall(r'"127\.0\.0\.1:\d+:(\d+)"|--metrics-port=(\d+)', compose)[0]) - {""}
    [table] = re.findall(r"^## Ports\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert ports <= set(re.findall(r"\d{4,5}", table))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE)
    assert [link for link in links if not (DEPLOY / link).exists()] == []
