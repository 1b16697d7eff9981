"""Text of others made fit for a log: one line, of bounded length, without secrets.

Keys, uids, paths and messages come from anybody. Nothing of them may end a line, move a cursor, or
turn round the direction in which a line is read; what would is shown as its escape.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Final

from dataplane.gateway.access.redaction import redact

EVENT_CHARS: Final = 4096
"""Longest event; more of it is cut out of the middle."""
FACT_CHARS: Final = 256
"""Longest fact beside it."""
TRACE_CHARS: Final = 16_384
"""Longest traceback."""

HIDDEN: Final = "***"
"""What stands where a secret was."""

_KEY_BLOCK: Final = re.compile(
    r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL
)
_BEARER: Final = re.compile(
    r"(?i)\b(authorization['\"]?\s*[:=,]\s*['\"]?bearer|bearer)\s+[^\s'\",]+"
)
_SHORTEST: Final = 8
"""Shorter ones are no secrets, and would be found in ordinary words."""


def one_line(text: str, limit: int = EVENT_CHARS) -> str:
    """The text on one line: what is not printed as a character of its own is shown as its escape,
    and what is longer than the limit has its middle cut out.

    Example: "a\\nb" is a, a backslash, n and b.
    """
    text = shortened(text, limit)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def shortened(text: str, limit: int) -> str:
    """The text with the middle cut out if it is longer than the limit; both ends say most."""
    over = len(text) - limit
    if over <= 0:
        return text
    head = limit // 2
    return f"{text[:head]}...[{over} characters]...{text[len(text) - (limit - head) :]}"


def _escape(char: str) -> str:
    return _NAMED.get(char) or char.encode("unicode_escape").decode("ascii")


_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Secrets:
    """What must not be in any line: tokens and private keys by their form, others as they are."""

    def __init__(self) -> None:
        self._known: tuple[str, ...] = ()

    def hide(self, secret: bytes | str) -> None:
        """Take this secret out of all text from now on, in every form in which it is written."""
        forms = {form for form in _forms(secret) if len(form) >= _SHORTEST}
        # The longest first: what is left of one must not be part of another.
        self._known = tuple(sorted(forms.union(self._known), key=len, reverse=True))

    def removed(self, text: str) -> str:
        """The text without secrets."""
        for form in self._known:
            if form in text:
                text = text.replace(form, HIDDEN)
        if "PRIVATE KEY-----" in text:
            text = _KEY_BLOCK.sub(rf"-----BEGIN \1-----{HIDDEN}", text)
        text = redact(text)
        return _BEARER.sub(rf"\1 {HIDDEN}", text)


def _forms(secret: bytes | str) -> Iterable[str]:
    if isinstance(secret, str):
        return [secret, *_forms(secret.encode("utf-8", "surrogatepass"))]
    # A base64 form in the middle of a longer one is shifted; such texts nobody writes.
    encoded = base64.b64encode(secret).decode().rstrip("=")
    return [
        secret.hex(), secret.hex().upper(), encoded, encoded.translate(_URL_SAFE),
        str(secret)[2:-1],
    ]  # fmt: skip


_URL_SAFE: Final = str.maketrans("+/", "-_")
