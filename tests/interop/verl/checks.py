"""What a run compared, and with what result."""

from __future__ import annotations

import io
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any


class Differs(AssertionError):
    """A value is not what it should be."""


class Checks:
    """Counts comparisons by part of the run; the first that fails ends its part."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self._part = ""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the run; an error in it is noted and goes no further."""
        self._part = name
        self.counts[name] = 0
        said = io.StringIO()
        try:
            # verl's progress bars and reports are worth reading only where something failed.
            with redirect_stdout(said), redirect_stderr(said):
                yield
        except Exception as error:
            print(said.getvalue())
            traceback.print_exc()
            self.failures[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {self.failures.get(name) or f'{self.counts[name]} checks, as expected'}")

    def equal(self, what: str, got: Any, expected: Any) -> None:
        """Two plain values are equal; numbers to 1e-5, so that float32 counts as its decimal."""
        if not _alike(got, expected):
            raise Differs(f"{what}: {_short(got)}, expected {_short(expected)}")
        self.counts[self._part] += 1

    def true(self, what: str, holds: object) -> None:
        """The statement holds."""
        if not holds:
            raise Differs(f"not so: {what}")
        self.counts[self._part] += 1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}… ({len(text)} characters)"


def _alike(got: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(got, bool):
        return bool(got) == bool(expected) and isinstance(got, bool) == isinstance(expected, bool)
    if isinstance(expected, float | int) and hasattr(got, "__float__"):
        return math.isclose(float(got), float(expected), rel_tol=1e-5, abs_tol=1e-5)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_alike, got, expected))
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_alike(got[k], expected[k]) for k in expected)
    return bool(got == expected)
