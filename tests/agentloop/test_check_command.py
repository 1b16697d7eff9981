"""`dataplane check rollout-server`: the command that agentloop adds to `dataplane check`."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from dataplane.cli import commands
from dataplane.cli.main import app
from tests.agentloop.rollout_server import RolloutServer

FOUND = EntryPoint(
    "rollout-server", "agentloop.engines.check_command:rollout_server", commands.CHECKS
)


async def asked(
    monkeypatch: pytest.MonkeyPatch, software: str, *words: str, **switches: Any
) -> Any:
    """What the command says of a server, asked from another thread."""
    monkeypatch.setattr(
        commands, "entry_points", lambda group: [FOUND] if group == commands.CHECKS else []
    )
    async with RolloutServer(software, **switches) as server:
        return await asyncio.to_thread(
            CliRunner().invoke, app, ["check", "rollout-server", server.url, *words]
        )


async def test_a_server_that_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await asked(monkeypatch, "vllm", version="12")
    assert said.exit_code == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0].split(maxsplit=2) == ["--", "server", "vllm 0.33.0, model m"]
    assert any(line.startswith("ok  token ids") for line in lines)
    assert max(map(len, lines)) <= 80


async def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await asked(monkeypatch, "sglang", "-o", "json")
    found = json.loads(said.stdout)
    answers = {each["question"]: each["ok"] for each in found["findings"]}
    assert answers["token ids"] is True
    assert set(answers) == {
        "server", "endpoint", "token ids", "log-probs", "weight versions", "chat drift",
        "admin port",
    }  # fmt: skip


async def test_a_server_that_is_not_exact_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await asked(monkeypatch, "transformers")
    assert said.exit_code == 1
    assert "no  token ids" in said.stdout


async def test_what_a_server_says_of_itself_prints_safely(monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile(reply: dict[str, Any]) -> None:
        reply["model"] = "m\x1b[2J"

    said = await asked(monkeypatch, "vllm", edit=hostile)
    assert all(line.isprintable() for line in (said.stdout + said.stderr).splitlines())


async def test_no_answer_ends_with_4_and_wrong_options_with_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = await asked(monkeypatch, "vllm", "--timeout", "5", raw_body=b"{")
    assert said.exit_code == 4
    assert said.stderr.startswith("dataplane: ")
    for words in (["--flavour", "tgi"], ["--timeout", "0"], ["-o", "xml"]):
        said = await asked(monkeypatch, "vllm", *words)
        assert said.exit_code == 2, words


async def test_the_installed_command_has_it() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dataplane.cli.main", "check", "--help",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert b"rollout-server" in out
