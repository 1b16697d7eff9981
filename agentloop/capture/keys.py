"""Who may do what: the server's key, and one key for each run.

Owns how keys look, how they are kept (hashed) and how they are compared. A key is in memory only
while it is made or shown.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final

PREFIX: Final = "dpr"

_KEY: Final = re.compile(r"dpr_([0-9a-f]{24})_[A-Za-z0-9_-]{43}")

_NONE: Final = bytes(32)
"""Compared with where there is nothing to compare with, so that this takes no less time."""


def new_run_id() -> str:
    """A random name for a run."""
    return secrets.token_hex(12)


def new_key(run_id: str) -> str:
    """A key for a run, which says its run."""
    return f"{PREFIX}_{run_id}_{secrets.token_urlsafe(32)}"


def hashed(key: str) -> bytes:
    """What is kept of a key. Keys are random and long, so one round of a hash is enough."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def run_of(key: str) -> str | None:
    """The run that a key says it is of; this proves nothing."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def is_key(shown: str, kept: bytes | None) -> bool:
    """Whether a key is the one that `kept` is of, in constant time; never if nothing is kept."""
    same = hmac.compare_digest(hashed(shown), _NONE if kept is None else kept)
    return same and kept is not None


def bearer(header: str | None) -> str:
    """The key in an Authorization header; empty if there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
