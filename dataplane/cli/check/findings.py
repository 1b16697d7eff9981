"""What `doctor` finds: one line for each thing it looked at, and what to do where it is wrong."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """How something is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    verdict: Verdict
    says: str
    advice: str = ""
    """What to do about it; empty where it is fine."""


def fine(check: str, says: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, says)


def doubtful(check: str, says: str, advice: str) -> Finding:
    """It may be meant so."""
    return Finding(check, Verdict.WARN, says, advice)


def wrong(check: str, says: str, advice: str) -> Finding:
    """A plane does not work like this."""
    return Finding(check, Verdict.FAIL, says, advice)
