"""`--since` and `--older-than`: points in a plane's history, as a revision or as a span of time.

A span (`90s`, `10m`, `2h`, `1d`) is answered by the moments that the plane remembers, on the safe
side: at most a few seconds more than asked for is shown, and never anything younger is cleared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dataplane.errors import InvalidRequest
from dataplane.types import Revision

if TYPE_CHECKING:
    from dataplane.client.sync import Client

SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since", help="Changes since then only: 10m ago, or a revision EPOCH:N.", metavar="WHEN"
    ),
]

_SPAN: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s|m|min|h|d|w)")
_REVISION: Final = re.compile(r"(\d{1,18}):(\d{1,18})")
_UNITS: Final = {
    "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0,
}  # fmt: skip


def span_s(text: str) -> float:
    """A span of time in seconds: `90s`, `10m`, `2h`, `1d`. InvalidRequest if it is none."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"{text!r:.40} is no span of time: give 90s, 10m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def since_of(text: str | None, client: Client) -> Revision | None:
    """The revision that `--since` means; None where it was not given."""
    if text is None:
        return None
    given = _REVISION.fullmatch(text.strip())
    if given is not None:
        return Revision(int(given[1]), int(given[2]))
    try:
        age_s = span_s(text)
    except InvalidRequest:
        raise InvalidRequest(
            f"--since {text!r:.40} is neither a span of time (90s, 10m, 2h, 1d) nor a revision "
            "(EPOCH:N, as listings and `dataplane status` say it)"
        ) from None
    # A revision of an earlier epoch stands for the beginning of all that is remembered.
    return client.revision_before(age_s) or Revision(0, 0)


def revision_text(revision: Revision) -> str:
    """A revision as `--since` takes it."""
    return f"{revision.epoch}:{revision.n}"
