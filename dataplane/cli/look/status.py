"""`dataplane status`: one plane at a glance."""

from __future__ import annotations

from typing import Any

import typer

from dataplane.cli.output import Column, Output, OutputOption, print_record, print_table
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import (
    age_text,
    bytes_text,
    count_text,
    share_text,
    visible,
)

STORES = (
    Column("store_id", "STORE"),
    Column("used_bytes", "USED", bytes_text, right=True),
    Column("capacity_bytes", "CAPACITY", bytes_text, right=True),
    Column("full", right=True),
    Column("held_bytes", "RESERVED", bytes_text, right=True),
    Column("blocks", "BLOCKS", count_text, right=True),
    Column("pins", "PINS", count_text, right=True),
    Column("pid", show=str, right=True),
)


def status(
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a plane at a glance: sizes, stores, who waits.

    Example: dataplane status
    """
    with reached(address, name, ray, timeout) as client:
        found = client.status()
        told = {
            "name": client.name,
            "plane_id": client.plane_id,
            **{entry: value for entry, value in found.items() if entry != "moments"},
        }
    print_record(told, output, lambda: _show(told))


def _show(status: dict[str, Any]) -> None:
    for title, text in _lines(status):
        typer.echo(f"{title:<12}{text}")
    stores = [
        {"store_id": store_id, **values, "full": share_text(used, capacity)}
        for store_id, values in sorted(status.get("values", {}).items())
        for used, capacity in [(values.get("used_bytes", 0), values.get("capacity_bytes", 0))]
    ]
    if stores:
        typer.echo("")
        print_table(stores, STORES)
    for store in stores:
        if "unreachable" in store:
            typer.echo(f"store {visible(store['store_id'])}: {visible(store['unreachable'])}")


def _lines(status: dict[str, Any]) -> list[tuple[str, str]]:
    """What is told, a line each. A gateway tells who may not operate everywhere no more than
    concerns the partitions that it may see."""
    partitions: dict[str, Any] = status["partitions"]
    keys = sum(each["keys"] for each in partitions.values())
    tag_bytes = sum(each["tag_bytes"] for each in partitions.values())
    epoch, n = status["revision"]
    plane = f"{visible(status['name'])} ({status['plane_id']})"
    server = [f"version {status['version']}"] if "version" in status else []
    if "uptime_s" in status:
        server.append(f"up {age_text(status['uptime_s'])}")
    sizes = f"{bytes_text(status['bytes_in_use'])} of values, {bytes_text(tag_bytes)} of tags"
    lines = [("plane", plane + (f", tag store pid {status['pid']}" if "pid" in status else ""))]
    if server:
        lines.append(("server", ", ".join(server)))
    lines.append(("revision", f"{epoch}:{n}, history since {status['history_floor']}"))
    if "clients" in status:
        lines.append(("clients", count_text(status["clients"])))
    lines.append(("partitions", f"{count_text(len(partitions))} with {count_text(keys)} keys"))
    held = sum(status.get("held_bytes", {}).values())
    lines.append(("bytes", sizes + (f", {bytes_text(held)} kept for open groups" if held else "")))
    if "blocks" in status:
        live, dead = count_text(status["blocks"]), count_text(status["dead_blocks"])
        lines.append(("blocks", f"{live} live, {dead} to be freed"))
    if "waiting" in status:
        waiting = {kind: count for kind, count in status["waiting"].items() if count}
        who = ", ".join(f"{count} for {kind}" for kind, count in waiting.items())
        lines.append(("waiting", who or "nobody"))
    if "principal" in status:
        lines.append(("caller", f"{visible(str(status['principal']))}, through a gateway"))
    return lines
