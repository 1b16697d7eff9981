"""`dataplane gateway`: a gateway in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.logs.options import LogFormat, LogLevel


def gateway(
    name: Annotated[
        str, typer.Option(envvar="DATAPLANE_NAME", help="Name of the plane that it serves.")
    ] = "default",
    address: Annotated[
        str | None,
        typer.Option(
            envvar="DATAPLANE_ADDRESS",
            help="Unix socket of the plane, as `dataplane serve` prints it.",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="host:port, [::1]:port or unix:/path; may be repeated."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Authority of clients' certificates, PEM.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="Hashes of tokens.")] = None,
    insecure_allow_anyone: Annotated[
        bool,
        typer.Option(help="Listen beyond this machine without credentials: anyone may do all."),
    ] = False,
    insecure_allow_plain_text: Annotated[
        bool,
        typer.Option(help="Listen beyond this machine without TLS: tokens can be read on the way."),
    ] = False,
    drain_s: Annotated[
        float | None, typer.Option(help="How long calls may go on at the end, in seconds.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of metrics for Prometheus; none if not set.")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of metrics; 127.0.0.1 if not set.")
    ] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="Folder of the plane's sockets, secret and journal.")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serve a plane to producers and consumers outside of it, by gRPC.

    Every setting can also be given as DATAPLANE_GATEWAY_…; see dataplane.gateway.config. It drains
    at SIGTERM, and ends with 1 if the plane ends before.

    Example: dataplane gateway --listen 0.0.0.0:50051 --tls-cert c.pem --tls-key k.pem
    --token-file tokens.json
    """
    from dataplane import session
    from dataplane.gateway.config import GatewayConfig
    from dataplane.gateway.process import run_until_signalled
    from dataplane.settings import checked

    given: dict[str, Any] = {
        "listen": listen or None,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "token_file": token_file,
        "insecure_allow_anyone": insecure_allow_anyone or None,
        "insecure_allow_plain_text": insecure_allow_plain_text or None,
        "drain_s": drain_s,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
    }
    given = {k: v for k, v in given.items() if v is not None}
    config = checked(GatewayConfig, given, "settings of the gateway")
    settings = {"runtime_dir": runtime_dir, "log_level": log_level, "log_format": log_format}
    plane_config = session.settings_of({k: v for k, v in settings.items() if v is not None})
    joined = session.join(name, address, plane_config)
    run_until_signalled(joined, config, plane_config, typer.echo)
