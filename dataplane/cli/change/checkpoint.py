"""`dataplane checkpoint`: a plane is saved, restored, and what was saved is looked at offline."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.cli.commands import Group
from dataplane.cli.exits import Code
from dataplane.cli.output import Column, Output, OutputOption, print_record, print_table
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import age_text, bytes_text, count_text, visible

checkpoint = typer.Typer(
    name="checkpoint",
    cls=Group,
    help="Save a plane, restore it, look at what was saved.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FolderArgument = Annotated[Path, typer.Argument(help="The checkpoint's folder.")]


def _fields(fields: list[dict[str, Any]]) -> str:
    """Fields on one line: `input_ids int64[1d], score float32[0d]`."""
    shown = [f"{visible(of['name'])} {of['dtype']}[{of['rank']}d]" for of in fields]
    return ", ".join(shown) or "-"


PARTITIONS = (
    Column("partition_id", "PARTITION"),
    Column("rows", show=count_text, right=True),
    Column("tag_file_bytes", "TAGS", bytes_text, right=True),
    Column("value_file_bytes", "VALUES", bytes_text, right=True),
    Column("open_groups", "OPEN GROUPS", count_text, right=True),
    Column("fields", show=_fields),
)


@checkpoint.command()
def save(
    path: FolderArgument,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Take the place of a checkpoint that is there.")
    ] = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write the whole plane, as of one moment, into a folder.

    Puts, claims and clears go on meanwhile. The folder appears whole or not at all.

    Example: dataplane checkpoint save /data/checkpoints/step-200
    """
    with reached(address, name, ray, timeout) as client:
        summary = client.save_checkpoint(path, overwrite=overwrite)
    print_record(summary, output, lambda: _say("saved", summary))


@checkpoint.command()
def load(
    path: FolderArgument,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Restore a checkpoint into a plane that is empty.

    All of it is checked first; after an error the plane is as empty as before.

    Example: dataplane checkpoint load /data/checkpoints/step-100 --name restored
    """
    with reached(address, name, ray, timeout) as client:
        summary = client.load_checkpoint(path)
    print_record(summary, output, lambda: _say("loaded", summary))


@checkpoint.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, a journal's folder, or a plane's runtime folder.")
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the files of a checkpoint or a journal.

    Says whether each is as it was written, byte by byte. Changes nothing and needs no plane. Ends
    with 1 if anything is damaged, missing or cut short.

    Example: dataplane verify /data/checkpoints/step-100
    """
    from dataplane.checkpoint.manifest import CHECKSUM, MANIFEST
    from dataplane.checkpoint.verify import verify_checkpoint
    from dataplane.tags.journal_verify import verify_journal

    if (path / MANIFEST).exists() or (path / CHECKSUM).exists():
        summary = verify_checkpoint(path)
        said = f"{visible(str(path))}: whole, {summary['rows']} rows, {summary['bytes']} bytes"
        print_record({**summary, "whole": True}, output, lambda: typer.echo(said))
        return
    folder = path / "journal" if (path / "journal").is_dir() else path
    findings = verify_journal(folder)
    whole = all(finding.is_whole for finding in findings)
    record = {
        "path": str(folder),
        "whole": whole,
        "files": [{"text": finding.text, "whole": finding.is_whole} for finding in findings],
    }

    def show() -> None:
        for finding in findings:
            typer.echo(finding.text)

    print_record(record, output, show)
    if not whole:
        raise typer.Exit(Code.BAD)


@checkpoint.command()
def inspect(path: FolderArgument, output: OutputOption = Output.TABLE) -> None:
    """Show what a checkpoint holds: partitions, rows, bytes, fields.

    Needs no plane, and reads the manifest only: `dataplane checkpoint verify` reads every byte.

    Example: dataplane checkpoint inspect /data/checkpoints/step-100
    """
    from dataplane.checkpoint.load import Checkpoint

    with Checkpoint(path) as opened:
        manifest = opened.manifest
    record: dict[str, Any] = {
        "path": str(path),
        "plane_name": manifest.plane_name,
        "plane_id": manifest.plane_id,
        "format_version": manifest.version,
        "revision": [manifest.epoch, manifest.n],
        "saved_at": datetime.fromtimestamp(manifest.saved_at, UTC).isoformat(timespec="seconds"),
        "rows": manifest.rows,
        "bytes": manifest.nbytes,
        "files": len(list(manifest.files())) + 2,
        "partitions": [_partition(of) for of in manifest.partitions],
    }
    print_record(record, output, lambda: _show(record))


def _partition(of: Any) -> dict[str, Any]:
    return {
        "partition_id": of.partition_id,
        "rows": of.rows,
        "tag_file_bytes": of.tags.nbytes,
        "value_file_bytes": sum(file.nbytes for file in of.values),
        "open_groups": sum(group.open for group in of.groups),
        "tasks": sorted(str(task.get("task", "")) for task in of.tasks),
        "sealed": of.sealed,
        "open_schema": of.open_schema,
        "quota": of.quota,
        "retention": of.retention,
        "fields": [
            {"name": name, "dtype": field.dtype, "rank": field.rank, "ragged_dim": field.ragged_dim}
            for name, field in sorted(of.fields.items())
        ],
    }


def _show(record: dict[str, Any]) -> None:
    epoch, n = record["revision"]
    typer.echo(
        f"{visible(record['path'])}: plane {visible(record['plane_name'])} "
        f"({record['plane_id']}) at revision {epoch}:{n}, saved {record['saved_at']}"
    )
    typer.echo(
        f"{count_text(record['rows'])} rows, {bytes_text(record['bytes'])} in {record['files']} "
        "files"
    )
    if record["partitions"]:
        typer.echo("")
        print_table(record["partitions"], PARTITIONS)


def _say(done: str, summary: dict[str, Any]) -> None:
    epoch, n = summary["revision"]
    typer.echo(
        f"{done} {visible(str(summary['path']))}: {count_text(summary['rows'])} rows, "
        f"{bytes_text(summary['bytes'])}, as of revision {epoch}:{n}, in "
        f"{age_text(summary['seconds'])}"
    )
    for partition_id, rows in summary["partitions"].items():
        typer.echo(f"  {visible(partition_id)}: {count_text(rows)} rows")
