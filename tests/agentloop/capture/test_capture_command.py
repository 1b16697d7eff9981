"""`dataplane capture`: a process that an operator starts; and commands that packages add."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
from typer.testing import CliRunner

from agentloop.capture.command import capture
from dataplane import AsyncClient
from dataplane.cli import commands
from tests.agentloop.capture.captured import ADMIN, Agent, user
from tests.agentloop.rollout_server import RolloutServer
from tests.contract.planes import Plane

CAPTURE = EntryPoint("capture", "agentloop.capture.command:capture", commands.GROUP)


def app_with(*found: EntryPoint, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A command with one of its own, and those that these entry points name."""
    monkeypatch.setattr(commands, "entry_points", lambda group: list(found))
    app = typer.Typer(cls=commands.Commands, pretty_exceptions_enable=False)

    @app.command()
    def serve() -> None:
        """Its own."""
        typer.echo("served")

    @app.callback()
    def main() -> None:
        """The group."""

    return app


def told(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed, without colours and line breaks."""
    result = CliRunner().invoke(app, list(arguments), env={"TERM": "dumb", "COLUMNS": "200"})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return result.exit_code, " ".join(plain.split())


def test_the_help_holds_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(CAPTURE, monkeypatch=monkeypatch)
    code, text = told(app, "--help")
    assert code == 0
    assert "capture" in text
    assert "serve" in text
    code, text = told(app, "capture", "--help")
    assert code == 0
    assert "Example: dataplane capture --upstream http://127.0.0.1:8000" in text
    assert "insecure-allow-anyone" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--upstream"),
        (["--upstream", "http://x", "--listen", "8080"], "no host:port"),
        (["--upstream", "http://x", "--listen", "h:99999"], "no host:port"),
        (["--upstream", "http://x", "--max-runs", "0"], "max_runs"),
        (["--upstream", "http://x", "--on-idle", "sleep"], "on_idle"),
        (["--upstream", "http://x", "--flavour", "tgi"], "flavour"),
        (["--upstream", "http://x", "--admin-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = told(app_with(CAPTURE, monkeypatch=monkeypatch), "capture", *arguments)
    assert code == 2
    assert said in text


def test_a_command_that_cannot_be_loaded_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = EntryPoint("gone", "no_such_package.command:run", commands.GROUP)
    nameless = EntryPoint("nameless", "agentloop.capture.command:no_such_name", commands.GROUP)
    app = app_with(gone, nameless, CAPTURE, monkeypatch=monkeypatch)
    code, text = told(app, "--help")
    assert code == 0
    assert "Not available here" in text
    for name in ("gone", "nameless"):
        code, text = told(app, name)
        assert code == 1
        assert "cannot be loaded" in text
    assert told(app, "serve") == (0, "served")


def test_a_command_is_loaded_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(EntryPoint):
        def load(self) -> Any:
            raise AssertionError("loaded")

    app = app_with(Never("other", "x:y", commands.GROUP), monkeypatch=monkeypatch)
    assert told(app, "serve") == (0, "served")


def test_its_own_commands_win(monkeypatch: pytest.MonkeyPatch) -> None:
    also = EntryPoint("serve", "no_such_package:serve", commands.GROUP)
    assert told(app_with(also, monkeypatch=monkeypatch), "serve") == (0, "served")


SCRIPT = """
import sys, typer
from agentloop.capture.command import capture
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(capture)
app(sys.argv[1:])
"""


async def test_a_process_captures_until_it_is_told_to_stop(
    plane: Plane, client: AsyncClient, partition: str, tmp_path: Path
) -> None:
    async with RolloutServer("vllm") as upstream:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT,
            "--upstream", upstream.url, "--listen", "127.0.0.1:0",
            "--address", str(plane.core.tags).removeprefix("unix:"), "--partition", partition,
            "--journal", str(tmp_path / "runs"), "--admin-key-env", "CAPTURE_KEY",
            "--logprob-kind", "raw", "--temperature", "1.0",
            env={**os.environ, "CAPTURE_KEY": ADMIN},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found is not None, line
            assert ADMIN not in line
            async with aiohttp.ClientSession() as session:
                agent = Agent(session, found[0])
                run = await agent.start(uid="u")
                await run.say([user("hi")])
                status, ended = await run.end(0.5)
                assert status == 200, json.dumps(ended)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    listing = await client.kv_list(partition)
    assert listing.keys == ["u_0_0"]
    assert dict(listing.tags[0])["score"] == 0.5


def test_the_command_is_what_the_entry_point_names() -> None:
    assert CAPTURE.load() is capture
