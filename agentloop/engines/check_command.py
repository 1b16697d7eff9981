"""The command `dataplane check rollout-server`: its options. What it asks is check_server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

NO_ANSWER = 4
"""It ends with this where the server does not answer, or answers wrong."""


def rollout_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, http://host:port.")],
    flavour: Annotated[
        str, typer.Option(help="vllm-chat, vllm-generate, sglang-chat …, or auto to ask.")
    ] = "auto",
    model: Annotated[
        str | None, typer.Option(help="As the server calls it; the first it lists if not set.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key.")
    ] = None,
    admin_url: Annotated[
        str | None, typer.Option(help="Where pause and update are, if not at URL.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's folder, for servers that give text only.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Deadline of all of it.")
    ] = 60.0,
    output: Annotated[
        Literal["table", "json"], typer.Option("--output", "-o", help="How to print it.")
    ] = "table",
) -> None:
    """Ask a rollout server what training from it rests on.

    Sends a handful of tiny requests and changes nothing. Says software and version, whether token
    ids and log-probs come and of which kind, weight versions, drift of the chat template, and
    whether the admin port is open. Ends with 0: exact; 1: it works, not exactly; 4: no answer.

    Example: dataplane check rollout-server http://127.0.0.1:8000
    """
    import asyncio

    from agentloop.engines.check_server import check_server, tokenizer_of
    from agentloop.engines.shapes import SHAPES
    from agentloop.engines.types import EngineError

    if flavour != "auto" and flavour not in SHAPES:
        raise typer.BadParameter(
            f"{flavour!r} is none of auto, {', '.join(SHAPES)}", param_hint="--flavour"
        )
    if not 0 < timeout < float("inf"):
        raise typer.BadParameter("a positive number of seconds", param_hint="--timeout")
    try:
        report = asyncio.run(
            check_server(
                url,
                flavour=flavour,
                model=model,
                api_key_env=api_key_env,
                admin_url=admin_url,
                tokenizer=tokenizer_of(None if tokenizer is None else str(tokenizer)),
                timeout_s=timeout,
            )
        )
    except EngineError as error:
        typer.echo(f"dataplane: {_printable(str(error))}", err=True)
        raise typer.Exit(NO_ANSWER) from None
    if output == "json":
        findings = [
            {"question": each.question, "answer": each.answer, "ok": each.ok}
            for each in report.findings
        ]
        typer.echo(json.dumps({"url": url, "findings": findings}, indent=2))
    else:
        for line in report.as_text().splitlines():
            typer.echo(_printable(line))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _printable(text: str) -> str:
    """What a server says of itself, so that it cannot play with the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
