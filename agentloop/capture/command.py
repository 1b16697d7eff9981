"""The command `dataplane capture`. Owns its options; nothing else is loaded until it is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from agentloop.capture.settings import CaptureSettings


def capture(
    upstream: Annotated[
        str, typer.Option(help="The vLLM or SGLang server, such as http://127.0.0.1:8000.")
    ],
    listen: Annotated[str, typer.Option(help="host:port that agents connect to.")] = (
        "127.0.0.1:8080"
    ),
    plane: Annotated[str, typer.Option(help="Name of the plane.")] = "default",
    address: Annotated[
        str | None,
        typer.Option(help="The plane's unix socket, or a gateway such as grpcs://host:port."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for a gateway, readable to you alone.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Authority of the gateway's certificate, PEM.")
    ] = None,
    partition: Annotated[str, typer.Option(help="Partition of the trajectories.")] = "train",
    journal: Annotated[
        Path | None,
        typer.Option(help="Folder in which runs are kept, so that a restart goes on with them."),
    ] = None,
    admin_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the key that starts runs; none asks nobody."),
    ] = None,
    upstream_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the upstream's key.")
    ] = None,
    flavour: Annotated[str, typer.Option(help="vllm-chat, sglang-chat, or auto to ask.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="As the upstream calls it; the first it lists if not set.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampled with, whatever agents ask.")
    ] = None,
    logprob_kind: Annotated[
        str, typer.Option(help="raw, processed, unknown, or probe to find it out.")
    ] = "probe",
    vocab_size: Annotated[int | None, typer.Option(help="Token ids from here on are wrong.")] = (
        None
    ),
    request_timeout_s: Annotated[float, typer.Option(help="Of one turn, tries included.")] = 600.0,
    max_runs: Annotated[int, typer.Option(help="Runs that have not ended.")] = 1024,
    max_turns: Annotated[int, typer.Option(help="Turns of one run.")] = 512,
    max_run_bytes: Annotated[int, typer.Option(help="Of the turns of one run.")] = 64 << 20,
    max_lag: Annotated[
        int | None, typer.Option(help="Steps that a run may be behind the trainer.")
    ] = None,
    idle_s: Annotated[float, typer.Option(help="After which a run ends by itself.")] = 3600.0,
    on_idle: Annotated[str, typer.Option(help="publish it as aborted, or drop it.")] = "publish",
    agents_may_reward: Annotated[
        bool, typer.Option(help="Whether a run's own key may say its reward and end it.")
    ] = True,
    insecure_allow_anyone: Annotated[
        bool,
        typer.Option(
            "--insecure-allow-anyone",
            help="Listen to other machines without any key: whoever reaches it may write rows.",
        ),
    ] = False,
) -> None:
    """Record what agents and a vLLM or SGLang server say, token by token, as trajectories.

    An agent takes part by its base URL: start a run with POST /v1/runs, give the agent the
    base_url and api_key that it answers, and say the reward with POST /v1/runs/RUN/end.

    Example: dataplane capture --upstream http://127.0.0.1:8000 --plane train --partition train
    """
    import asyncio

    from agentloop.engines.http import Limits

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{listen!r} is no host:port", param_hint="--listen")
    settings = _settings(
        upstream={
            "url": upstream, "flavour": flavour, "model": model, "api_key_env": upstream_key_env,
            "logprob_kind": None if logprob_kind == "unknown" else logprob_kind,
            "vocab_size": vocab_size,
            "forced": {} if temperature is None else {"temperature": temperature},
            "limits": Limits(request_timeout_s=request_timeout_s),
        },
        limits={
            "max_runs": max_runs, "max_turns": max_turns, "max_run_bytes": max_run_bytes,
            "max_lag": max_lag, "idle_s": idle_s, "on_idle": on_idle,
        },
        partition_id=partition, journal=journal, agents_may_reward=agents_may_reward,
    )  # fmt: skip
    asyncio.run(
        _serve(
            settings, host.strip("[]"), int(port), plane, address,
            {"token_file": token_file, "ca_file": ca_file}, _key(admin_key_env),
            insecure_allow_anyone=insecure_allow_anyone,
        )
    )  # fmt: skip


def _settings(
    *, upstream: dict[str, Any], limits: dict[str, Any], **others: Any
) -> CaptureSettings:
    from agentloop.capture.settings import CaptureSettings, RunLimits, UpstreamSettings

    try:
        return CaptureSettings(UpstreamSettings(**upstream), limits=RunLimits(**limits), **others)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _key(variable: str | None) -> str | None:
    import os

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise typer.BadParameter(f"the environment variable {variable} is not set")
    return key


async def _serve(
    settings: CaptureSettings,
    host: str,
    port: int,
    plane: str,
    address: str | None,
    access: dict[str, Path | None],
    admin_key: str | None,
    *,
    insecure_allow_anyone: bool,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    import asyncio
    import signal

    from agentloop.capture.make import make_server
    from agentloop.engines.types import EngineError
    from dataplane import async_connect

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    config = {name: path for name, path in access.items() if path is not None}
    async with await async_connect(plane, address=address, config=config) as client:
        try:
            server = make_server(
                settings, client, admin_key=admin_key, insecure_allow_anyone=insecure_allow_anyone
            )
            url = await server.start(host, port)
        except (EngineError, OSError, ValueError) as error:
            typer.echo(f"dataplane capture: {error}", err=True)
            raise typer.Exit(1) from None
        typer.echo(f"capturing at {url}, upstream {settings.upstream.url}")
        try:
            await stopped.wait()
        finally:
            await server.stop()
