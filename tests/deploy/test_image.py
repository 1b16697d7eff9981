"""The image: its recipe passes hadolint, keeps our rules, and copies what the repository has."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, check_command, check_setting
from tests.repo.tree import ROOT

TEXT = (DEPLOY / "Dockerfile").read_text()


def _hadolint(text: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
    assert found is not None, "it comes with the extra `dev`"
    return subprocess.run(
        [found, "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_hadolint_has_nothing_to_say() -> None:
    done = _hadolint(TEXT)
    assert done.returncode == 0, done.stdout


def test_hadolint_would_say_it() -> None:
    assert "DL3007" in _hadolint("FROM python:latest\n").stdout


def test_it_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)$", TEXT, re.MULTILINE)
    assert users == ["10001:10001"]


def test_its_base_is_pinned() -> None:
    [base] = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)


def test_its_commands_are_commands() -> None:
    for line in re.findall(r"^\s*CMD \[(.*)\]$", TEXT, re.MULTILINE):
        check_command([word.strip().strip('"') for word in line.split(",")])


def test_its_variables_are_settings() -> None:
    for name in re.findall(r"\b(DATAPLANE_\w+)=", TEXT):
        check_setting(name)


def test_its_extras_are_there() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([\w,]*)", TEXT)
    assert named
    for extras in named:
        assert set(filter(None, extras.split(","))) <= known.keys()


def test_what_it_copies_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in kept, source


@pytest.mark.parametrize("module", ["dataplane.cli.main", "dataplane.gateway.server"])
def test_a_gateway_needs_neither_torch_nor_ray(module: str) -> None:
    """What the image with EXTRAS=gateway leaves out."""
    code = (
        "import sys\n"
        f"import {module}, dataplane.server.process, dataplane.host.embedded\n"
        "print([n for n in ('torch', 'ray', 'tensordict', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
