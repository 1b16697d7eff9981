"""The `dataplane` command: what an operator does to a plane from a shell."""

from __future__ import annotations

import traceback
from typing import Annotated, Final

import typer

from dataplane.cli.commands import Commands, Part
from dataplane.cli.exits import Code

_LOOK = "Look at a plane"
_CHECK = "Find out what is wrong"
_CHANGE = "Take, put and clear rows"
_SAVE = "Save and restore"
_RUN = "Run and admit"

PARTS: Final = {
    "status": Part("dataplane.cli.look.status:status", _LOOK),
    "partitions": Part("dataplane.cli.look.partitions:partitions", _LOOK),
    "keys": Part("dataplane.cli.look.keys:keys", _LOOK),
    "show": Part("dataplane.cli.look.show:show", _LOOK),
    "stats": Part("dataplane.cli.look.stats:stats", _LOOK),
    "top": Part("dataplane.cli.look.top:top", _LOOK),
    "tail": Part("dataplane.cli.look.tail:tail", _LOOK),
    "watch": Part("dataplane.cli.look.tail:tail", _LOOK, hidden=True),
    "trace": Part("dataplane.cli.look.trace:trace", _LOOK),
    "report": Part("dataplane.cli.look.report:report", _LOOK),
    "why": Part("dataplane.cli.check.why:why", _CHECK),
    "waiters": Part("dataplane.cli.check.waiters:waiters", _CHECK),
    "leaks": Part("dataplane.cli.check.leaks:leaks", _CHECK),
    "doctor": Part("dataplane.cli.check.doctor:doctor", _CHECK),
    "config": Part("dataplane.cli.check.config:config", _CHECK),
    "check": Part("dataplane.cli.check.perf:check", _CHECK),
    "get": Part("dataplane.cli.change.get:get", _CHANGE),
    "put": Part("dataplane.cli.change.put:put", _CHANGE),
    "clear": Part("dataplane.cli.change.clear:clear", _CHANGE),
    "release": Part("dataplane.cli.change.release:release", _CHANGE),
    "export": Part("dataplane.cli.change.export:export", _CHANGE),
    "checkpoint": Part("dataplane.cli.change.checkpoint:checkpoint", _SAVE),
    "verify": Part("dataplane.cli.change.checkpoint:verify", _SAVE),
    "serve": Part("dataplane.cli.run.serve:serve", _RUN),
    "gateway": Part("dataplane.gateway.command:gateway", _RUN),
    "token": Part("dataplane.cli.run.tokens:tokens", _RUN),
}
"""Every command by its name. Only the one that a line names is loaded."""


class Own(Commands):
    """The group of all commands."""

    parts = PARTS


app = typer.Typer(
    name="dataplane",
    cls=Own,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in a help text or a message [x] is what it says, and not markup
)


def _version(asked: bool) -> None:
    if asked:
        from dataplane.release import release

        typer.echo(f"dataplane {release()}")
        raise typer.Exit


@app.callback()
def main_callback(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A key-value data plane for reinforcement-learning post-training of language models.

    Every command has --help with an example. Those on a plane find it by --address or --name, or
    by themselves where one runs on this machine; -o json, yaml or csv print for programs.

    Ends with 0: fine; 1: what was looked at is bad; 2: a wrong request; 3: not found;
    4: no plane reached; 5: too late; 6: not allowed; 7: refused; 70: a fault of this package.
    """


def main() -> None:
    """Entry point of the command."""
    try:
        app(prog_name="dataplane")
    except Exception:
        traceback.print_exc()
        typer.echo("dataplane: that is a fault of this package; please report it", err=True)
        raise SystemExit(Code.INTERNAL) from None


if __name__ == "__main__":
    main()
