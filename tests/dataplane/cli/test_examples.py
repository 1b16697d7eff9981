"""Every command's help fits 80 columns and holds an example, and that runs as it is printed.

All but this is as on an operator's machine: /data is a folder of the test, the port that an example
listens on is any that is free, and a model's server is where the test has one.
"""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

import dataplane
from dataplane import Client
from dataplane.cli.main import app

GO_ON: Final = {
    "serve": "serves at",
    "gateway": "listens",
    "capture": "http://",
    "tail": '"change"',
}
"""Commands that go on until they are ended, and what they print once they are at work."""
ENDED_BY: Final = {"tail": signal.SIGINT}
"""Signals other than SIGTERM that end them."""
WAIT_S: Final = 60.0


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, groups and hidden ones as well."""
    context = typer.Context(group, info_name="dataplane")
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield (*path, name)
        if hasattr(found, "list_commands"):
            yield from commands(found, (*path, name))


def command_of(words: tuple[str, ...]) -> Any:
    found: Any = ROOT_COMMAND
    for word in words:
        found = found.get_command(typer.Context(found, info_name="dataplane"), word)
    return found


ROOT_COMMAND: Final[Any] = typer.main.get_command(app)
EVERY: Final = list(commands(ROOT_COMMAND))
LEAVES: Final = [words for words in EVERY if not hasattr(command_of(words), "list_commands")]


def examples_of(words: tuple[str, ...]) -> list[str]:
    """The command lines that the help of a command holds."""
    text = (command_of(words).help or "").replace("\f", "")
    found = re.findall(r"Example: (.+?)(?=\n\s*\n|\nExample: |\Z)", text, re.DOTALL)
    return [" ".join(example.split()) for example in found]


EXAMPLES: Final = [(words, example) for words in LEAVES for example in examples_of(words)]


@pytest.mark.parametrize("words", [(), *EVERY], ids=" ".join)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    listed = said.output.partition("\nOptions:")[2]
    assert not re.search(r"\.\.\.$", listed, re.MULTILINE), "what a command does is cut short"


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_help_holds_an_example(words: tuple[str, ...]) -> None:
    examples = examples_of(words)
    assert examples, "its docstring has no line `Example: dataplane …`"
    said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert f"Example: {examples[0]}" in " ".join(said.output.split())
    assert all(example.split()[0] == "dataplane" for example in examples)


# -- examples as they are printed ------------------------------------------------------------


@pytest.fixture
def restored(here: dict[str, Any]) -> Iterator[Client]:
    """A plane of that name, with nothing in it."""
    client = dataplane.init(here, name="restored")
    yield client
    client.close(destroy=True)


@pytest.fixture
def model_server() -> Iterator[str]:
    """The URL of a server of a model, as rollouts ask one."""
    from tests.agentloop.rollout_server import RolloutServer

    loop = asyncio.new_event_loop()
    server = RolloutServer("vllm")
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
        yield server.url
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("words", "example"), EXAMPLES, ids=[f"{' '.join(words)}" for words, _ in EXAMPLES]
)
def test_examples_run(
    words: tuple[str, ...], example: str, desk: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    line = _at(example, desk["cwd"])
    if "--name restored" in line:
        request.getfixturevalue("restored")
    if "http://" in line:
        line = re.sub(r"http://\S+", request.getfixturevalue("model_server"), line)
    if words[0] == "capture":
        line += " --listen 127.0.0.1:0"
    if words[0] in GO_ON and "--count" not in line:
        _goes_on(line, GO_ON[words[0]], ENDED_BY.get(words[0], signal.SIGTERM), desk)
        return
    done = subprocess.run(
        ["bash", "-ec", line],
        capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL, **desk,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def _at(example: str, folder: Path) -> str:
    """The example with paths and ports of this machine."""
    return re.sub(r"(0\.0\.0\.0|127\.0\.0\.1):\d+", r"\1:0", example).replace(
        "/data/", f"{folder}/data/"
    )


def _goes_on(line: str, mark: str, ended_by: signal.Signals, desk: dict[str, Any]) -> None:
    """It comes to work, and ends well when it is told to."""
    child = subprocess.Popen(
        ["bash", "-ec", f"exec {line}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **desk,
    )  # fmt: skip
    assert child.stdout is not None
    said = ""
    deadline = time.monotonic() + WAIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while mark not in said and time.monotonic() < deadline and child.poll() is None:
            if selector.select(0.2):
                said += os.read(child.stdout.fileno(), 65536).decode()
    child.send_signal(ended_by)
    rest, _ = child.communicate(timeout=WAIT_S)
    assert mark in said, said + rest.decode()
    assert child.returncode == 0, said + rest.decode()


def test_the_console_script_is_the_same_command() -> None:
    script = shutil.which("dataplane", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("it is not installed here")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    assert "status" in done.stdout
