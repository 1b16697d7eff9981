"""Which release of this package runs here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release() -> str:
    """The version of the installed package; `unknown` where it was not installed."""
    try:
        return version("rl-dataplane")
    except PackageNotFoundError:
        return "unknown"
