"""Every command of docs/cli.md prints what the page says; `...` there stands for anything."""

from __future__ import annotations

import doctest
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from dataplane.cli.exits import Code
from dataplane.cli.main import app

PAGE: Final = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
BLOCKS: Final = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SAID: Final = [
    (command, output)
    for block in BLOCKS
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
"""Command lines in the order of the page, and what each prints."""


@pytest.mark.slow
def test_the_page_runs_as_it_is_printed(desk: dict[str, Any]) -> None:
    """One plane for all of them: some change it."""
    assert len(SAID) > 20
    wrong = [said for command, output in SAID if (said := _differs(command, output, desk))]
    assert not wrong, "\n\n".join(wrong)


def _differs(command: str, output: str, desk: dict[str, Any]) -> str | None:
    """What a command prints, unless that is what the page says."""
    done = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, **desk,
    )  # fmt: skip
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if doctest.OutputChecker().check_output(output, done.stdout, flags):
        return None
    return f"$ {command}\n{done.stdout}"


def test_the_page_names_every_command() -> None:
    root: Any = typer.main.get_command(app)
    context = typer.Context(root, info_name="dataplane")
    shown = set(root.list_commands(context))
    assert {name for name in shown if f"`{name}" in PAGE or f"dataplane {name}" in PAGE} == shown


def test_the_page_names_every_code() -> None:
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert named == {int(code) for code in Code}
