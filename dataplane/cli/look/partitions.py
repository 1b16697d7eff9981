"""`dataplane partitions`: what each partition holds."""

from __future__ import annotations

from typing import Any

from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import ABSENT, bytes_text, count_text


def quota_text(quota: dict[str, int] | None) -> str:
    """The limit in bytes."""
    return bytes_text((quota or {}).get("bytes"))


def sealed_text(sealed: bool) -> str:
    """Whether no new row comes in."""
    return "yes" if sealed else ABSENT


COLUMNS = (
    Column("partition_id", "PARTITION"),
    Column("keys", show=count_text, right=True),
    Column("payload_bytes", "VALUES", bytes_text, right=True),
    Column("tag_bytes", "TAGS", bytes_text, right=True),
    Column("used_bytes", "IN USE", bytes_text, right=True),
    Column("quota", "QUOTA", quota_text, right=True),
    Column("groups", "GROUPS", count_text, right=True),
    Column("waiting", "WAIT", count_text, right=True),
    Column("sealed", "SEALED", sealed_text),
)


def partitions(
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List partitions: keys, bytes, quota, open groups.

    IN USE is what counts against the quota: extents in whole pages, and tags. WAIT is how many
    puts and groups wait for room in it.

    Example: dataplane partitions
    """
    with reached(address, name, ray, timeout) as client:
        sizes: dict[str, Any] = client.status()["partitions"]
        described = client.kv_list_partitions()
    print_rows(
        [_row(each, entry, sizes.get(each, {})) for each, entry in sorted(described.items())],
        COLUMNS,
        output,
        empty="there is no partition",
    )


def _row(partition_id: str, entry: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "partition_id": partition_id,
        "keys": entry["keys"],
        "payload_bytes": sizes.get("payload_bytes"),
        "tag_bytes": sizes.get("tag_bytes"),
        "used_bytes": entry["used_bytes"],
        "held_bytes": entry["held_bytes"],
        "quota": entry["quota"],
        "retention": entry["retention"],
        "groups": entry["groups"],
        "waiting": entry["waiting"],
        "sealed": entry["sealed"],
        "revision": entry["revision"],
        "open_schema": entry["open_schema"],
        "schema": {name: field._asdict() for name, field in sorted(entry["schema"].items())},
    }
