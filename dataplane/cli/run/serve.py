"""`dataplane serve`: a plane in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.logs.options import LogFormat, LogLevel


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
    shm_dir: Annotated[
        Path | None, typer.Option(help="Folder of shared memory, a tmpfs; /dev/shm if not set.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of metrics for Prometheus; none if not set.")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of metrics; 127.0.0.1 if not set.")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run a plane until SIGTERM or Ctrl-C; should its process die, it is started again.

    Example: dataplane serve --name train
    """
    from dataplane.config import Config
    from dataplane.host.embedded import serve_until_signalled
    from dataplane.settings import checked

    settings: dict[str, Any] = {
        "capacity_bytes": capacity_bytes,
        "tcp_host": tcp_host,
        "runtime_dir": runtime_dir,
        "shm_dir": shm_dir,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "log_level": log_level,
        "log_format": log_format,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    serve_until_signalled(name, checked(Config, given), typer.echo)
