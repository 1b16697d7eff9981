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
        for store_id, values in sorted(status["values"].items())
        for used, capacity in [(values.get("used_bytes", 0), values.get("capacity_bytes", 0))]
    ]
    typer.echo("")
    print_table(stores, STORES)
    for store in stores:
        if "error" in store:
            typer.echo(f"store {store['store_id']}: {visible(str(store['error']))}")


def _lines(status: dict[str, Any]) -> list[tuple[str, str]]:
    partitions: dict[str, Any] = status["partitions"]
    keys = sum(each["keys"] for each in partitions.values())
    tag_bytes = sum(each["tag_bytes"] for each in partitions.values())
    epoch, n = status["revision"]
    waiting = {kind: count for kind, count in status["waiting"].items() if count}
    held = sum(status["held_bytes"].values())
    lines = [
        (
            "plane",
            f"{visible(status['name'])} ({status['plane_id']}), tag store pid {status['pid']}",
        ),
        ("revision", f"{epoch}:{n}, history since {status['history_floor']}"),
        ("clients", count_text(status["clients"])),
        ("partitions", f"{count_text(len(partitions))} with {count_text(keys)} keys"),
        (
            "bytes",
            f"{bytes_text(status['bytes_in_use'])} of values, {bytes_text(tag_bytes)} of tags"
            + (f", {bytes_text(held)} kept for open groups" if held else ""),
        ),
        (
            "blocks",
            f"{count_text(status['blocks'])} live, {count_text(status['dead_blocks'])} to be freed",
        ),
        (
            "waiting",
            ", ".join(f"{count} for {kind}" for kind, count in waiting.items()) or "nobody",
        ),
    ]
    if "version" in status:
        up = f"version {status['version']}, up {age_text(status.get('uptime_s'))}"
        lines.insert(1, ("server", up))
    return lines
