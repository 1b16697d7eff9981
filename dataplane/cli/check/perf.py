"""`dataplane check perf`: how fast a plane is here and now, beside this machine's own memory."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dataplane.cli.commands import Checks
from dataplane.cli.output import Column, Output, OutputOption, print_record, print_table
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import ABSENT, bytes_text, count_text
from dataplane.errors import PartitionNotFound

if TYPE_CHECKING:
    from dataplane.client.sync import Client

check = typer.Typer(
    name="check",
    cls=Checks,
    help="Measure and try things against a plane that is there.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PREFIX: Final = "dataplane-check-"
"""How the partitions begin that a check makes and drops."""
SHARE: Final = 8
"""A batch takes at most this part of what the value stores have free: one that replaces another
lies beside it for a while, and the rows before them in between."""


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _rate(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.0f} %"


COLUMNS = (
    Column("name", "WHAT"),
    Column("p50_ms", "P50 MS", _ms, right=True),
    Column("p99_ms", "P99 MS", _ms, right=True),
    Column("times", show=count_text, right=True),
    Column("bytes", show=bytes_text, right=True),
    Column("mib_per_s", "MIB/S", _rate, right=True),
    Column("of_memcpy", "OF MEMCPY", _share, right=True),
)


@check.callback()
def _group() -> None:
    """Measure and try things against a plane that is there."""


@check.command()
def perf(
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of each latency.")] = 300,
    size_mib: Annotated[
        int, typer.Option(min=1, max=65_536, help="Size of the batch, in MiB.")
    ] = 64,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Measure puts, gets and wake-ups against a live plane.

    In a partition of its own, which is dropped at the end, also after Ctrl-C. Batches are compared
    with memcpy of as many bytes on this machine in the same run. The batch is made smaller where
    the value stores have little room.

    Example: dataplane check perf --count 100 --size-mib 16
    """
    from dataplane.cli.check.measuring import measured

    partition = f"{PREFIX}{secrets.token_hex(6)}"
    with _ended_like_ctrl_c(), reached(address, name, ray, timeout) as client:
        nbytes = min(size_mib << 20, _room(client) // SHARE)
        try:
            results = [each._asdict() for each in measured(client, partition, count, nbytes)]
        finally:
            try:
                client.kv_drop_partition(partition)
            except PartitionNotFound:
                pass  # it was interrupted before the first row
    record: dict[str, Any] = {
        "plane": client.name,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "partition_id": partition,
        "results": results,
    }

    def show() -> None:
        print_table(results, COLUMNS)
        typer.echo(f"{record['cpus']} CPUs, load {record['load']:.1f}")

    print_record(record, output, show)


@contextmanager
def _ended_like_ctrl_c() -> Generator[None]:
    """SIGTERM too lets the block clean up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _room(client: Client) -> int:
    """What is free in the fullest value store; a lot where a gateway does not say."""
    stores: dict[str, dict[str, Any]] = client.status().get("values", {})
    free = [
        values["capacity_bytes"] - values["used_bytes"]
        for values in stores.values()
        if "capacity_bytes" in values
    ]
    return min(free, default=1 << 40)
