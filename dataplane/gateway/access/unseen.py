"""What errors of the plane say of partitions that the caller may not see: left out here. Pure.

Inside a plane everybody sees everything, and its errors name other partitions where that helps:
those with a similar name, the one that fills the store, the one that an attempt is of. Outside,
who may not see a partition must not learn that there is one.
"""

from __future__ import annotations

import re
from typing import Final

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    QuotaExceeded,
    StaleWrite,
)
from dataplane.gateway.access.roles import Principal

_ABSENT: Final = "there is no partition "
_OTHERS: Final = "; there "
"""What an explanation goes on with that names the partitions there are."""
_FULLEST: Final = re.compile(r"; partition .* holds the most", re.DOTALL)
_ATTEMPT: Final = re.compile(r"attempt (\d+) (belongs to partition|is not open:) ")


def without_unseen(error: DataplaneError, principal: Principal) -> DataplaneError:
    """The error as this caller may see it: the same one, or one that says less."""
    if any(not grant.partition.strip("*") for grant in principal.grants):
        return error
    if isinstance(error, DeadlineExceeded):
        why = error.explanation
        if why is not None and why.startswith(_ABSENT):
            said = why.partition(_OTHERS)[0]
            message = error.message.replace(why, said)
            return DeadlineExceeded(message, waited_s=error.waited_s, explanation=said)
    elif isinstance(error, QuotaExceeded):
        found = _FULLEST.search(error.message)
        if found is not None:
            return QuotaExceeded(
                error.message[: found.start()],
                used_bytes=error.used_bytes,
                limit_bytes=error.limit_bytes,
            )
    elif isinstance(error, InvalidRequest | StaleWrite):
        # Of an attempt that is open elsewhere and of one that is not open the same is said.
        attempt = _ATTEMPT.match(error.message)
        if attempt is not None:
            number = int(attempt[1])
            return StaleWrite(
                f"attempt {number} is not open: its group ended, began anew or was retired, so "
                "what still comes for it is dropped; begin the group again if it is wanted",
                keys=[],
                attempt=number,
            )
    return error


def text_without_unseen(text: str) -> str:
    """The text of an error that was refused to somebody, for who does not see everything."""
    attempt = _ATTEMPT.match(text)
    if attempt is not None:
        return f"attempt {attempt[1]} is not open"
    found = _FULLEST.search(text)
    if found is not None:
        text = text[: found.start()]
    before, absent, rest = text.partition(_ABSENT)
    return before + absent + rest.partition(_OTHERS)[0] if absent else text
