"""Rows that a consumer holds under leases: taken in pieces, ended in pieces.

Owns that nothing is cleared which is not held: a commit comes before each clear, and is refused if
the lease has ended and the rows may be somebody else's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dataplane import AsyncClient, Claim, ClaimLost


@dataclass(frozen=True, slots=True)
class Ended:
    """How the end of some claims went."""

    lost: frozenset[str]
    """Keys that were not held any more: they were cleared, or their lease had ended."""
    error: ClaimLost | None = None
    """The first of the errors that said so."""


class Holdings:
    """Claims, and which of their rows are still to be ended."""

    def __init__(self, claims: Iterable[Claim] = ()) -> None:
        self._claims: list[Claim] = []
        self._keys: set[str] = set()
        for claim in claims:
            self.add(claim)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What is held, claim by claim."""
        return tuple(self._claims)

    def add(self, claim: Claim) -> None:
        """Hold the rows of one more claim."""
        if len(claim):
            self._claims.append(claim)
            self._keys.update(claim.keys)

    def part(self, keys: Collection[str]) -> list[Claim]:
        """The claims of those of these rows that are held, each with no other row."""
        parts: list[Claim] = []
        for claim in self._claims:
            others = set(claim.keys).difference(keys)
            if len(others) < len(claim):
                parts.append(claim.without(others) if others else claim)
        return parts

    def drop(self, keys: Collection[str]) -> None:
        """These rows are held no longer."""
        left = [claim.without(keys) for claim in self._claims]
        self._claims = [claim for claim in left if len(claim)]
        self._keys.difference_update(keys)


async def commit(client: AsyncClient, claims: Sequence[Claim]) -> Ended:
    """Finish these claims; what they have lost is told, and the rest is finished.

    A claim that was finished before is finished still: it may be repeated.
    """
    lost: set[str] = set()
    first: ClaimLost | None = None
    for claim in claims:
        try:
            await client.kv_commit(claim)
        except ClaimLost as error:
            first = first or error
            lost.update(error.keys)
            rest = claim.without(error.keys)
            if len(rest):
                await client.kv_commit(rest)
    return Ended(frozenset(lost), first)


async def release(client: AsyncClient, claims: Sequence[Claim]) -> None:
    """Give the rows of these claims back, those that are still held."""
    for claim in claims:
        try:
            await client.kv_release(claim)
        except ClaimLost as error:
            rest = claim.without(error.keys)
            if len(rest):
                await client.kv_release(rest)
