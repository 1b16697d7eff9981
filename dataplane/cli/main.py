"""The `dataplane` command: what an operator does to a plane from a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.cli.commands import Commands
from dataplane.cli.tokens import tokens
from dataplane.errors import DataplaneError
from dataplane.gateway.command import gateway

app = typer.Typer(
    name="dataplane",
    cls=Commands,
    help="A key-value data plane for reinforcement-learning post-training.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def main_callback() -> None:
    """A key-value data plane for reinforcement-learning post-training."""


@app.command()
def serve(
    name: Annotated[str, typer.Option(help="Name that clients join the plane by.")] = "default",
    capacity_bytes: Annotated[
        int | None, typer.Option(help="Limit of the value store; free shared memory if not set.")
    ] = None,
    tcp_host: Annotated[
        str | None, typer.Option(help="Address to listen on for other nodes; none if not set.")
    ] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="Folder of sockets, secret and journal.")
    ] = None,
    shm_dir: Annotated[Path, typer.Option(help="Folder of shared memory, a tmpfs.")] = Path(
        "/dev/shm"
    ),
) -> None:
    """Run a plane until SIGTERM or Ctrl-C; should its process die, it is started again.

    Example: dataplane serve --name train
    """
    from dataplane.config import Config
    from dataplane.host.embedded import serve_until_signalled

    settings: dict[str, Any] = {
        "capacity_bytes": capacity_bytes,
        "tcp_host": tcp_host,
        "runtime_dir": runtime_dir,
        "shm_dir": shm_dir,
    }
    serve_until_signalled(
        name, Config(**{k: v for k, v in settings.items() if v is not None}), typer.echo
    )


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, a journal's folder, or a plane's runtime folder.")
    ],
) -> None:
    """Say whether each file of a checkpoint or a journal is as it was written.

    Changes nothing and needs no plane. Ends with 1 if anything is damaged, missing or cut short.

    Example: dataplane verify /data/checkpoints/step-100
    """
    from dataplane.checkpoint.manifest import CHECKSUM, MANIFEST
    from dataplane.checkpoint.verify import verify_checkpoint
    from dataplane.tags.journal_verify import verify_journal

    if (path / MANIFEST).exists() or (path / CHECKSUM).exists():
        summary = verify_checkpoint(path)
        typer.echo(f"{path}: whole, {summary['rows']} rows, {summary['bytes']} bytes")
        return
    folder = path / "journal" if (path / "journal").is_dir() else path
    findings = verify_journal(folder)
    for finding in findings:
        typer.echo(finding.text)
    if not all(finding.is_whole for finding in findings):
        raise typer.Exit(1)


app.command()(gateway)
app.add_typer(tokens)


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except DataplaneError as error:
        typer.echo(f"dataplane: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
