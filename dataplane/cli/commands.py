"""The group of all commands: its own and those that other packages add, and how each one ends.

Owns the group of entry points: a command is found by name, loaded when it is asked for, and a
package that cannot be loaded costs its own command and no other. Owns what becomes of an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, cast

import typer
from typer.core import TyperGroup

from dataplane.cli.exits import Code, say
from dataplane.cli.output import CHOSEN, Output
from dataplane.errors import DataplaneError, InvalidRequest

GROUP: Final = "dataplane.commands"
"""Entry points whose name is a command's and whose object is the function that typer runs."""
CHECKS: Final = "dataplane.checks"
"""The same of the commands of `dataplane check`."""

_ADDED: Final = "Added by other packages"
_LINE: Final = "dataplane.line"
UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""What typer raises for a line that it cannot read."""


class Group(TyperGroup):
    """A group of commands whose help says each one's first sentence whole, under the headings that
    their `rich_help_panel` names."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None)
                title = title if isinstance(title, str) else "Commands"
                sections.setdefault(title, []).append((name, _first_sentence(command.help)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Part(NamedTuple):
    """A command of this package's own that is loaded when it is asked for."""

    target: str
    """`module:object`: the function that typer runs, or a Typer with several."""
    panel: str
    """The heading of help that it is listed under."""
    hidden: bool = False


class Commands(Group):
    """A group of commands of its own and of those that entry points name: `Typer(cls=Commands)`.

    Its own come first and win over others of the same name.
    """

    parts: ClassVar[Mapping[str, Part]] = MappingProxyType({})
    """Commands of its own, by name."""
    adds: ClassVar[str] = GROUP
    """The entry points whose commands it has too."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all, its own first."""
        own = [*self.parts, *super().list_commands(ctx)]
        return [*own, *sorted(set(_found(self.adds)) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, loaded; None if there is none."""
        part = self.parts.get(cmd_name)
        if part is not None:
            return _command(_object(part.target), cmd_name, part.panel, hidden=part.hidden)
        own = super().get_command(ctx, cmd_name)
        found = None if own is not None else _found(self.adds).get(cmd_name)
        return own if found is None else _loaded(found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that a line names; where there is none, the error says what is meant."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            meant = get_close_matches(args[0], self.list_commands(ctx)) if args else []
            said = getattr(error, "message", None)
            if meant and isinstance(said, str) and "ean" not in said:
                vars(error)["message"] = f"{said} Did you mean {' or '.join(meant)}?"
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The rest of the line."""
        ctx.meta.setdefault(_LINE, tuple(args))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the line names; an error becomes a message and an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except UsageError as error:
            # Its own words, with a hint of how it is used, for all but programs.
            if not _asks_for_json(ctx.meta[_LINE]):
                raise
            refused = InvalidRequest(cast("Any", error).format_message())
            raise typer.Exit(say(refused, as_json=True)) from None
        except DataplaneError as error:
            as_json = ctx.meta.get(CHOSEN) is Output.JSON
            raise typer.Exit(say(error, as_json=as_json)) from None
        except BrokenPipeError:
            _leave_stdout()  # whoever read it has enough, as `| head` does
            raise typer.Exit(Code.FINE) from None
        except KeyboardInterrupt:
            raise typer.Exit(Code.INTERRUPTED) from None
        return result


class Checks(Commands):
    """The group of what is measured and tried."""

    adds = CHECKS


def _asks_for_json(line: Sequence[str]) -> bool:
    """Whether a line, which could not be read to its end, says `-o json`."""
    words = " ".join(line).replace("=", " ").replace("--output", "-o").split()
    return any(pair == ("-o", Output.JSON) for pair in pairwise(words)) or "-ojson" in words


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


def _leave_stdout() -> None:
    """Let what is still to be written go nowhere: the interpreter would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _found(group: str) -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=group)}


def _loaded(found: EntryPoint) -> Any:
    """The command behind an entry point, or one that says why there is none."""
    try:
        function = found.load()
    except (ImportError, AttributeError) as error:
        function = _missing(found, error)
    return _command(function, found.name, _ADDED)


def _object(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _command(made_of: Any, name: str, panel: str, *, hidden: bool = False) -> Any:
    """The command that a function is, or the group that a Typer is."""
    if isinstance(made_of, typer.Typer):
        group: Any = typer.main.get_group(made_of)
        group.name, group.rich_help_panel, group.hidden = name, panel, hidden
        return group
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, rich_help_panel=panel, hidden=hidden)(made_of)
    return typer.main.get_command(app)


def _missing(found: EntryPoint, error: Exception) -> Any:
    def missing() -> None:
        typer.echo(
            f"dataplane: {found.name} cannot be loaded from {found.value}: {error}", err=True
        )
        raise typer.Exit(1)

    missing.__doc__ = f"Not available here: {error}"
    return missing
