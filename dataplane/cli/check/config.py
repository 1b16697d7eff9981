"""`dataplane config`: which settings hold here, and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from dataplane.cli.output import Column, Output, OutputOption, print_record, print_table
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import value_text, visible
from dataplane.errors import DataplaneError

VALUES = (Column("name", "SETTING"), Column("value"), Column("source", "FROM"))
SCHEMA = (
    Column("variable"),
    Column("unit"),
    Column("default"),
    Column("doc", "WHAT IT SAYS"),
)


def config(
    schema: Annotated[
        bool, typer.Option("--schema", help="Every setting with unit, default and what it says.")
    ] = False,
    gateway: Annotated[bool, typer.Option("--gateway", help="The settings of a gateway.")] = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show the settings that hold in this shell.

    And what the plane says of itself, where one is reached. A setting is a variable DATAPLANE_…, or
    its default; what a program gives to init() or serve is not known here. Tables leave out what is
    not set. Tokens are never shown. Ends with 2 if a setting is wrong.

    Example: dataplane config --schema
    """
    from dataplane.cli.check.settings import SHELL, Setting, settings_of, unknown_variables
    from dataplane.config import Config
    from dataplane.gateway.config import GatewayConfig
    from dataplane.settings import checked

    kinds: dict[str, Any] = {"plane": Config, "gateway": GatewayConfig}
    found: dict[str, list[Setting]] = {}
    for of, kind in kinds.items():
        found[of] = settings_of(kind, os.environ, checked(kind, {}, f"settings of the {of}"))
    known = {each.variable for settings in found.values() for each in settings} | SHELL.keys()
    record: dict[str, Any] = {
        of: [each._asdict() for each in settings] for of, settings in found.items()
    }
    record["unknown"] = unknown_variables(os.environ, known)
    record["reached"] = None if schema else _reached(address, name, ray, timeout)
    chosen = record["gateway" if gateway else "plane"]

    def show() -> None:
        if schema:
            print_table(chosen, SCHEMA)
            return
        set_ = [each for each in chosen if each["source"] != "default" or each["value"] is not None]
        print_table(set_, VALUES)
        for variable in record["unknown"]:
            typer.echo(f"{visible(variable)} is no setting: nothing reads it")
        if record["reached"] is not None:
            typer.echo("")
            for title, value in record["reached"].items():
                typer.echo(f"{title:<16}{value_text(value)}")

    print_record(record, output, show)


def _reached(
    address: str | None, name: str | None, ray: str | None, timeout: float | None
) -> dict[str, Any]:
    """What the plane says of itself, or why there is none."""
    try:
        with reached(address, name, ray, timeout) as client:
            status = client.status()
    except DataplaneError as error:
        return {"plane": None, "why": error.message}
    return {
        "plane": client.name,
        "plane_id": client.plane_id,
        "version": status.get("version"),
        "stores": {
            store: {
                entry: values[entry]
                for entry in ("capacity_bytes", "segment_bytes", "pid")
                if entry in values
            }
            for store, values in status.get("values", {}).items()
        },
    }
