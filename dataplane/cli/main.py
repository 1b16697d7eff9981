"""The `dataplane` command: what an operator does to a plane from a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.errors import DataplaneError

app = typer.Typer(
    name="dataplane",
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
    """Run a plane in this process until SIGTERM or Ctrl-C.

    Example: dataplane serve --name train
    """
    from dataplane.config import Config
    from dataplane.server.process import run_until_signalled

    settings: dict[str, Any] = {
        "capacity_bytes": capacity_bytes,
        "tcp_host": tcp_host,
        "runtime_dir": runtime_dir,
        "shm_dir": shm_dir,
    }
    run_until_signalled(
        name, Config(**{k: v for k, v in settings.items() if v is not None}), typer.echo
    )


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except DataplaneError as error:
        typer.echo(f"dataplane: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
