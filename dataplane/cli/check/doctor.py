"""`dataplane doctor`: whether a plane can work here, and what to do where it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING, Final

import typer

from dataplane.cli.check.findings import Finding, Verdict, doubtful, fine, wrong
from dataplane.cli.exits import Code
from dataplane.cli.output import Column, Output, OutputOption, print_rows, width
from dataplane.cli.reach import AddressOption, RayOption
from dataplane.cli.shown import visible
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from dataplane.config import Config

WIDEST: Final = 20
"""Letters of what was looked at; a longer one has a line of its own."""
COLUMNS = (Column("check"), Column("verdict"), Column("says"), Column("advice", "WHAT TO DO"))


def doctor(
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    ray: RayOption = None,
) -> None:
    """Check this machine and the planes on it.

    Versions, settings, folders and their modes, shared memory, open files, remains of planes,
    sockets, clocks; the gateway or plane of --address; the Ray cluster of --ray or RAY_ADDRESS.
    Changes nothing. Ends with 1 if anything fails.

    Example: dataplane doctor
    """
    found = list(_findings(address, ray or os.environ.get("RAY_ADDRESS")))
    if output is Output.TABLE:
        wide = min(max(len(each.check) for each in found), WIDEST)
        for each in found:
            _show(each, wide)
        count = {verdict: sum(each.verdict is verdict for each in found) for verdict in Verdict}
        typer.echo(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    else:
        print_rows([each._asdict() for each in found], COLUMNS, output)
    if any(each.verdict is Verdict.FAIL for each in found):
        raise typer.Exit(Code.BAD)


def _show(found: Finding, wide: int) -> None:
    """A finding on a line, or on more where a line does not hold it."""
    start, rest = f"{found.verdict:<5} {visible(found.check):<{wide}}  ", " " * (wide + 8)
    if len(start) > len(rest):
        typer.echo(start.rstrip())
        start = rest
    for said in filter(None, (found.says, found.advice and f"-> {found.advice}")):
        typer.echo(
            fill(
                visible(said),
                max(width(), len(rest) + 20),
                initial_indent=start,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
        start = rest


def _findings(address: str | None, ray: str | None) -> Iterator[Finding]:
    from dataplane.cli.check.machine import (
        of_limits,
        of_packages,
        of_remains,
        of_runtime,
        of_shared_memory,
        of_system,
    )

    yield from of_system()
    yield from of_packages()
    yield from of_limits()
    config, findings = _settings()
    yield from findings
    if config is None:
        return
    from dataplane.cli.check.surroundings import of_address, of_planes, of_ray
    from dataplane.host.folders import default_root

    root = config.runtime_dir or default_root()
    yield from of_runtime(root)
    yield from of_shared_memory(config)
    yield from of_remains(root, config.shm_dir)
    yield from of_planes(config, root)
    if address is not None:
        yield from of_address(address, config)
    if ray is not None:
        yield from of_ray(ray)


def _settings() -> tuple[Config | None, list[Finding]]:
    """The settings that hold here, if they can be used at all."""
    from dataplane.cli.check.settings import SHELL, settings_of, unknown_variables
    from dataplane.config import Config
    from dataplane.gateway.config import GatewayConfig
    from dataplane.settings import checked

    environment = os.environ
    try:
        config = checked(Config, {})
        gateway = checked(GatewayConfig, {}, "settings of the gateway")
    except InvalidRequest as error:
        return None, [wrong("settings", str(error), "see `dataplane config --schema`")]
    read = [
        *settings_of(Config, environment, config),
        *settings_of(GatewayConfig, environment, gateway),
    ]
    unknown = unknown_variables(environment, {each.variable for each in read} | SHELL.keys())
    given = sorted(each.variable for each in read if each.source == "environment")
    findings = [fine("settings", f"valid; set here: {', '.join(given) or 'none'}")]
    findings += [
        doubtful("settings", f"{variable} is no setting", "is it misspelled? Nothing reads it")
        for variable in unknown
    ]
    return config, findings
