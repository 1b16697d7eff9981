"""The logs of a process that belongs to a plane: where they go, and what is in every line.

Only processes of our own are set up (stores, gateways, `dataplane serve`): what a training run or a
notebook does with its loggers is its own affair. The tree is `dataplane.*`.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from dataplane.logs.escaping import Secrets
from dataplane.logs.lines import JsonLines, TextLines

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Form: TypeAlias = Literal["text", "json"]
Role: TypeAlias = Literal["supervisor", "stores", "tag_store", "value_store", "gateway"]
"""What a process is for: `stores` has both kinds, a supervisor starts one that has ended again."""

log = logging.getLogger("dataplane.process")

_secrets: Final = Secrets()
_LEVELS: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR,
}  # fmt: skip


def set_up(
    role: Role, *, level: Level, form: Form, plane: str = "", plane_id: str = "", stream: Any = None
) -> None:
    """From here on this process logs one event a line, to standard error if no stream is given.

    What others log (asyncio, Ray, warnings of Python) takes the same form, from WARNING on. So do
    errors that nobody caught. Repeatable: the last one holds.
    """
    place = {"plane": plane, "plane_id": plane_id, "role": role}
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if form == "json":
        utf = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
        handler.setFormatter(JsonLines(place, _secrets, ascii_only=not utf))
    else:
        handler.setFormatter(TextLines(place, _secrets))
    root = logging.getLogger()
    for before in list(root.handlers):
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    logging.getLogger("dataplane").setLevel(_LEVELS[level])
    logging.captureWarnings(capture=True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def hide(secret: bytes | str) -> None:
    """Take this secret out of every line of this process, whoever writes it."""
    _secrets.hide(secret)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("the process ends by an error that nobody caught", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    what = (args.exc_type, args.exc_value, args.exc_traceback)
    log.error("a thread ended by an error that nobody caught", exc_info=what)
