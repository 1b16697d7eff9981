"""`dataplane top`: a plane as it lives, frame by frame."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer

from dataplane.cli.look.frame import frame
from dataplane.cli.look.sample import Sample, Sampler
from dataplane.cli.output import Column, Output, OutputOption, Stream, console_of, print_rich
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.errors import InvalidRequest

FIRST_LOOK_S = 0.5
"""Between the two looks that `--once` takes: a rate needs two."""
COLUMNS = (Column("at_s"), Column("name"), Column("revision"), Column("clients"), Column("rates"))


def top(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600.0)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    count: Annotated[int | None, typer.Option(help="End after so many frames.", min=1)] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Watch a plane live: rates, lag, bytes, who waits.

    Until Ctrl-C or q. With -o json a line of JSON for each frame. Red is what somebody should look
    at: a store that is full or does not answer, an open group whose producer is gone. Yellow is
    what is about to be: little room is left, or somebody waits for room.

    Example: dataplane top --once
    """
    if output is Output.CSV:
        raise InvalidRequest("a frame of top is no table: use json, yaml or table")
    try:
        with reached(address, name, ray, timeout) as client:
            sampler = Sampler(client)
            if once:
                sampler.look()
                time.sleep(min(interval, FIRST_LOOK_S))
                _print(sampler.look(), output)
            elif output is Output.TABLE and sys.stdout.isatty():
                _live(sampler, interval, count)
            else:
                _frames(sampler, interval, count, output)
    except KeyboardInterrupt:
        return


def _print(sample: Sample, output: Output) -> None:
    if output is Output.TABLE:
        print_rich(frame(sample))
    else:
        Stream(COLUMNS, output).print(sample.told())


def _frames(sampler: Sampler, interval_s: float, count: int | None, output: Output) -> None:
    """Frames below each other, for what reads them line by line."""
    while True:
        _print(sampler.look(), output)
        sys.stdout.flush()
        count = None if count is None else count - 1
        if count == 0:
            return
        time.sleep(interval_s)


def _live(sampler: Sampler, interval_s: float, count: int | None) -> None:
    """Frames in place of each other, on a screen of their own."""
    from rich.live import Live

    with (
        _keys() as pressed,
        Live(console=console_of(sys.stdout), screen=True, auto_refresh=False) as live,
    ):
        while count is None or count > 0:
            live.update(frame(sampler.look(), interval_s, live.console.height), refresh=True)
            count = None if count is None else count - 1
            if count != 0 and pressed(interval_s) in ("q", "Q"):
                return


@contextmanager
def _keys() -> Generator[_Pressed]:
    """Keys are read as they are pressed, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _Pressed(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _Pressed:
    """What was pressed, waited for."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __call__(self, within_s: float) -> str:
        """The key that was pressed in so many seconds; empty if none was."""
        if self._fd is None:
            time.sleep(within_s)
            return ""
        ready, _, _ = select.select([self._fd], [], [], within_s)
        return sys.stdin.read(1) if ready else ""
