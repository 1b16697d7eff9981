"""`dataplane get`: values of some keys, as a file that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.cli.names import listed, names_of
from dataplane.cli.output import Output, OutputOption, print_record
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import bytes_text, count_text, visible

FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fields", "-f", metavar="NAMES", help="Fields, separated by commas; all if not given."
    ),
]


def get(
    partition: PartitionArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEYS", help="The keys.")],
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="The file: .npz, .safetensors or .parquet.")
    ],
    fields: FieldsOption = None,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write the values of some keys to a file.

    Bit for bit, and all of one moment. .npz and .safetensors have an entry KEY/FIELD for each cell,
    in its own shape, and the list of keys as `keys`; .parquet has a row for each key. What a format
    has no type for is refused (bfloat16 and float8 in .npz), and the message says where it is kept.

    Example: dataplane get train u1_0_0 u1_1_0 --fields input_ids,labels --to u1.safetensors
    """
    from dataplane.cli.values.row_files import KINDS, check_path, write_rows

    names = names_of(fields, "--fields")
    check_path(to, KINDS)
    with reached(address, name, ray, timeout) as client:
        wanted = list(dict.fromkeys(keys))
        rows = client.kv_batch_get(wanted, partition, names, layout="list")
        size = write_rows(to, rows)
    record: dict[str, Any] = {
        "path": str(to),
        "partition_id": partition,
        "keys": rows.keys,
        "fields": list(rows.fields),
        "file_bytes": size,
        "revision": rows.revision,
    }

    def show() -> None:
        typer.echo(
            f"{visible(str(to))}: {count_text(len(rows))} rows with {listed(rows.fields, 12)}, "
            f"{bytes_text(size)}"
        )

    print_record(record, output, show)
