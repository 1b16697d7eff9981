"""The question before something is changed for good, and who may be asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dataplane.errors import InvalidRequest

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be touched, and change nothing.")
]


def agreed(shown: Sequence[str], question: str, *, yes: bool) -> bool:
    """Whether to go on: what will be touched is told on standard error first, in any case.

    InvalidRequest where somebody would have to be asked and there is no terminal.
    """
    for line in shown:
        typer.echo(line, err=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidRequest(
            f"{question} There is no terminal to ask at, and nothing was changed: look with "
            "--dry-run, then repeat with --yes"
        )
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
