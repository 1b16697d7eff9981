"""The error of a run's settings: everything that is wrong with them, in one list."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Settings that make no run. One line says what is wrong where, and `problems` has them all."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        title = "a setting is wrong" if count == 1 else f"{count} settings are wrong"
        super().__init__(
            "\n".join([f"{source}: {title}", *(f"  {line}" for line in self.problems)])
        )
