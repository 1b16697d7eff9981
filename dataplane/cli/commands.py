"""Commands that other packages add to `dataplane`: found by name, loaded when they are asked for.

Owns the group of entry points. A package that cannot be loaded costs its own command and no other.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.core import TyperGroup

GROUP: Final = "dataplane.commands"
"""Entry points whose name is a command's and whose object is the function that typer runs."""


class Commands(TyperGroup):
    """A group of commands of its own and of those that entry points name: `Typer(cls=Commands)`.

    Its own come first and win over others of the same name.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(set(_found()) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        found = None if own is not None else _found().get(cmd_name)
        return own if found is None else _loaded(found)


def _found() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}


def _loaded(found: EntryPoint) -> Any:
    """The command behind an entry point, or one that says why there is none."""
    try:
        function = found.load()
    except (ImportError, AttributeError) as error:
        function = _missing(found, error)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(found.name)(function)
    return typer.main.get_command(app)


def _missing(found: EntryPoint, error: Exception) -> Any:
    def missing() -> None:
        typer.echo(
            f"dataplane: {found.name} cannot be loaded from {found.value}: {error}", err=True
        )
        raise typer.Exit(1)

    missing.__doc__ = f"Not available here: {error}"
    return missing
