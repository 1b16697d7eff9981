"""Which release of this package runs here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

PACKAGE: Final = "rl-dataplane"
"""As it is installed."""


@cache
def release() -> str:
    """The version of the installed package; `unknown` where it was not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"
