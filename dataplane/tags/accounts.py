"""Who holds how much of a partition: rows, their tags, the extents of their blocks. Pure.

Every row belongs to one account: its producer's, or that of the group that it was put for. A
group's account is part of its producer's, and a producer's part of its partition's. Blocks are
charged to the accounts of their rows, in equal shares, from publication until they are dead.
Rows that `begin_group` makes for prompts are kept apart: a quota leaves them out.
"""

from __future__ import annotations


class Account:
    """What some rows hold. A change of it is also one of its parent."""

    __slots__ = ("extent_bytes", "held_bytes", "held_rows", "parent", "rows", "tag_bytes")

    def __init__(self, parent: Account | None = None) -> None:
        self.parent = parent
        self.rows = 0
        self.tag_bytes = 0
        self.extent_bytes = 0
        self.held_bytes = 0
        """Reserved for groups, and not used by them yet."""
        self.held_rows = 0

    @property
    def used_bytes(self) -> int:
        """Extents and tags, where having no tags, a mapping of one byte, is nothing."""
        return self.extent_bytes + self.tag_bytes - self.rows

    @property
    def total_bytes(self) -> int:
        """Everything that counts against a quota in bytes."""
        return self.used_bytes + self.held_bytes

    @property
    def total_rows(self) -> int:
        """Everything that counts against a quota in rows."""
        return self.rows + self.held_rows

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of it."""
        return not (
            self.rows or self.tag_bytes or self.extent_bytes or self.held_bytes or self.held_rows
        )

    def add_rows(self, rows: int, tag_bytes: int) -> None:
        """Rows came, or went (negative)."""
        account: Account | None = self
        while account is not None:
            account.rows += rows
            account.tag_bytes += tag_bytes
            account = account.parent

    def add_extent(self, nbytes: int) -> None:
        """A share of a block came, or went (negative)."""
        account: Account | None = self
        while account is not None:
            account.extent_bytes += nbytes
            account = account.parent

    def hold(self, nbytes: int, rows: int) -> None:
        """Set what is reserved: more, or less than before. Parents change by the difference."""
        more_bytes = nbytes - self.held_bytes
        more_rows = rows - self.held_rows
        account: Account | None = self
        while account is not None:
            account.held_bytes += more_bytes
            account.held_rows += more_rows
            account = account.parent


class Producer(Account):
    """What one client has put into one partition."""

    __slots__ = ("client_id",)

    def __init__(self, client_id: str, partition: Account) -> None:
        super().__init__(partition)
        self.client_id = client_id
