"""Tokens are taken out of text: what a log or an error may show of one is its id.

Nothing of this package logs a token or quotes one. This is for what others write, such as the
metadata of a call in somebody's traceback.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_TOKEN: Final = re.compile(r"(dpt_[a-z2-7]{12})_[A-Za-z0-9_-]+")


def redact(text: str) -> str:
    """The text without the secrets of tokens in it."""
    return _TOKEN.sub(r"\1_***", text)


class RedactTokens(logging.Filter):
    """Takes tokens out of what a handler logs, tracebacks too. To be added to handlers: filters of
    a logger do not see what its children log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: the record is logged, without tokens."""
        message = record.getMessage()
        redacted = redact(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        if record.exc_info and not record.exc_text:
            # Formatters take the text of a traceback from here where there is one.
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True
