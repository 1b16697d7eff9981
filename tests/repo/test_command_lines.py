"""Every `dataplane …` that a page or an alert tells an operator to type is understood.

Lines of blocks are parsed as they would be run, without running them. Words between backticks may
leave out what a command needs (`dataplane clear --older-than`): commands and options that they name
have to be there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import typer

from dataplane.cli.main import app
from tests.repo.tree import ROOT

PAGES: Final = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "prometheus" / "alerts.yaml",
]
BLOCK: Final = re.compile(r"^```\w*\n(.*?)^```|^((?:    .*\n)+)", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(r"(?<!`)`dataplane\s([^`]+)`(?!`)")
ROOT_COMMAND: Final[Any] = typer.main.get_command(app)
DEFAULT: Final = "group"
"""What `dataplane trace` is without a command of its own."""
REFUSED: Final[Any] = typer.BadParameter.__base__
"""What is raised of any line that is wrong: typer's own kind, by whatever click it brings."""
ENDS: Final = frozenset({">", ">>", "|", "||", "&", "&&", ";"})


class Line(NamedTuple):
    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def words_of(text: str) -> tuple[str, ...]:
    """The words up to what is the shell's."""
    found: list[str] = []
    for word in shlex.split(text, comments=True):
        if word in ENDS:
            break
        found.append(word)
    return tuple(found)


def lines_of(path: Path) -> Iterator[Line]:
    """The command lines of a page."""
    page, text = str(path.relative_to(ROOT)), path.read_text()
    if path.suffix == ".md":
        for fenced, indented in BLOCK.findall(text):
            for line in re.sub(r"\\\n\s*", " ", fenced or indented).splitlines():
                told = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*dataplane (.*)", line)
                if told is not None and not told[1].startswith("|"):
                    yield Line(page, words_of(told[1]), whole=True)
        text = BLOCK.sub("", text)
    for told in INLINE.findall(text):
        yield Line(page, words_of(" ".join(told.split())), whole=False)


LINES: Final = sorted({line for path in PAGES for line in lines_of(path)})


def found_in(group: Any, word: str) -> Any:
    context = typer.Context(group, info_name="dataplane")
    return group.get_command(context, word) if hasattr(group, "get_command") else None


def commands_of(words: tuple[str, ...]) -> Iterator[tuple[Any, list[str]]]:
    """What is named, with the words that are left for it: of `token list|revoke` two."""
    command, rest = ROOT_COMMAND, list(words)
    while rest and hasattr(command, "get_command") and not rest[0].startswith("-"):
        names = rest[0].split("|")
        if len(names) > 1:
            for name in names:
                found = found_in(command, name)
                assert found is not None, f"there is no command {name!r}"
                yield found, rest[1:]
            return
        found = found_in(command, rest[0])
        if found is None and (default := found_in(command, DEFAULT)) is not None:
            command = default
            continue
        assert found is not None, f"there is no command {rest[0]!r}"
        command = found
        rest = rest[1:]
    yield command, rest


def test_there_are_lines_of_both_kinds() -> None:
    pages = {line.page for line in LINES}
    assert {"README.md", "deploy/README.md", "docs/metrics.md", "docs/cli.md"} <= pages
    assert "deploy/prometheus/alerts.yaml" in pages
    assert {line.whole for line in LINES} == {True, False}


@pytest.mark.parametrize("line", LINES, ids=str)
def test_it_is_understood(line: Line) -> None:
    for command, rest in commands_of(line.words):
        if line.whole:
            command.make_context("dataplane", rest)  # parses, and calls nothing
            continue
        options = {"--help", *(name for each in command.params for name in each.opts)}
        options |= {name for each in command.params for name in each.secondary_opts}
        for word in rest:
            name = word.split("=")[0]
            if re.match(r"--?[a-zA-Z]", name):
                assert name in options, f"{command.name} has no option {name}"


@pytest.mark.parametrize("words", [("keys", "p", "--no-such"), ("sing",), ("token", "list|sing")])
def test_what_is_not_there_is_found_out(words: tuple[str, ...]) -> None:
    with pytest.raises((AssertionError, REFUSED)):
        test_it_is_understood(Line("here", words, whole=len(words) > 2))
