"""The register of parity cases: small functions over a module `tq`, by category.

A live case takes the module and a partition that is its own; a pure one takes the module alone.
What a case gives back is described, never judged: the other side's answer is the expectation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODULES = (
    "checkpoints", "tags", "fields", "shapes", "errors", "kv_batch_meta", "batch_meta", "client",
    "claims", "keys", "samplers", "streaming", "vectors", "closed",
)  # fmt: skip

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """One case, by the name `category/what_it_shows`."""

    name: str
    category: str
    function: Callable[..., Any]
    live: bool

    def run(self, tq: Any) -> Any:
        """What this side gives; partitions of live cases bear the case's name."""
        return self.function(tq, self.name) if self.live else self.function(tq)


def category(name: str, *, live: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that registers functions as cases of one category."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        add(name, function.__name__, function, live=live)
        return function

    return register


def add(category: str, what: str, function: Callable[..., Any], *, live: bool) -> None:
    """Register one case by hand, for those that a loop makes."""
    name = f"{category}/{what}"
    assert name not in CASES, f"two cases are named {name}"
    CASES[name] = Case(name, category, function, live)


def load() -> dict[str, Case]:
    """Every case, in the order of the files."""
    for module in MODULES:
        importlib.import_module(f"tests.interop.parity.{module}")
    return CASES


class Raised:
    """An error that a case asked for; equal where the drop-in raises a subclass."""

    def __init__(self, error: BaseException) -> None:
        self.names = [kind.__name__ for kind in type(error).__mro__]
        self.text = str(error)


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The error of a call, or what it returned where it raised none."""
    try:
        returned = function(*args, **kwargs)
    except Exception as error:
        return Raised(error)
    return {"raised nothing, returned": returned}


def says(function: Callable[..., Any], *words: str) -> Any:
    """The error of a call and whether its text has these words: some callers match on them."""
    found = raised(function)
    if isinstance(found, Raised):
        return {"error": found, "says": {word: word in found.text for word in words}}
    return found
