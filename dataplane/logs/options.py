"""The options of a command whose process logs; those that are left out come from the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias, get_args

import typer

from dataplane.logs.process import Form, Level


def _one_of(known: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def checked(given: str | None) -> str | None:
        if given is not None and given not in known:
            raise typer.BadParameter(f"{given!r:.80} is none of {', '.join(known)}")
        return given

    return checked


_LEVELS: Final = get_args(Level)
_FORMS: Final = get_args(Form)

LogLevel: TypeAlias = Annotated[
    str | None,
    typer.Option(help="debug, info, warning or error.", callback=_one_of(_LEVELS)),
]
LogFormat: TypeAlias = Annotated[
    str | None, typer.Option(help="text or json, one event a line.", callback=_one_of(_FORMS))
]
