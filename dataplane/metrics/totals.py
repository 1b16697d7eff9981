"""What a tag store has done since its process started, as plain integers.

Always counted: an addition costs nothing beside the change that it counts.
"""

from __future__ import annotations


class Totals:
    """Counts of a tag store's process."""

    __slots__ = (
        "bytes_put", "claims", "clears", "commits", "gets", "puts", "refusals", "releases",
        "rows_claimed", "rows_cleared", "rows_committed", "rows_got", "rows_lost", "rows_put",
    )  # fmt: skip

    def __init__(self) -> None:
        self.puts = 0
        """Puts that were made; one that came again counts once."""
        self.rows_put = 0
        self.bytes_put = 0
        """Bytes of their blocks: values, with their padding; tags are none of them."""
        self.refusals: dict[str, int] = {}
        """Puts that were refused, by the class of the error."""
        self.gets = 0
        """Times that somebody asked where rows lie."""
        self.rows_got = 0
        self.clears = 0
        """Clears that removed something."""
        self.rows_cleared = 0
        self.claims = 0
        self.rows_claimed = 0
        self.commits = 0
        self.rows_committed = 0
        self.releases = 0
        """Claims, or parts of them, that were given back or whose term was over."""
        self.rows_lost = 0

    @property
    def refused(self) -> int:
        """Puts that were refused."""
        return sum(self.refusals.values())

    def refuse(self, error: BaseException) -> None:
        """A put is refused."""
        name = type(error).__name__
        self.refusals[name] = self.refusals.get(name, 0) + 1

    def as_dict(self) -> dict[str, int]:
        """All of them, by name, for `status`."""
        names = [name for name in self.__slots__ if name != "refusals"]
        return {**{name: getattr(self, name) for name in names}, "refused": self.refused}
