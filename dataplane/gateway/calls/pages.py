"""Listings that are read page by page: kept for a while, so that all pages are of one revision.

Owns how many are kept and for how long, and the tokens that name a place in one. A token is good
for the principal it was given to, and for the same question. Time and randomness are arguments.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from dataplane.errors import InvalidRequest, TooOld
from dataplane.gateway.calls.listed import Listed
from dataplane.types import Revision

MAX_TOKEN: Final = 64


class Kept:
    """A listing of which not all pages were read yet."""

    __slots__ = ("full", "listed", "name", "nbytes", "principal", "question", "revision", "until")

    def __init__(
        self,
        name: str,
        principal: str,
        question: bytes,
        listed: Listed,
        nbytes: int,
        revision: Revision,
        *,
        full: bool,
    ) -> None:
        self.name = name
        self.principal = principal
        self.question = question
        self.listed = listed
        self.nbytes = nbytes
        self.revision = revision
        self.full = full
        self.until = 0.0

    def token(self, offset: int) -> str:
        """What names a place in it."""
        return f"{self.name}.{offset}"


class Pages:
    """The listings that are kept."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_per_principal: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        new_name: Callable[[], str] = lambda: secrets.token_urlsafe(16),
    ) -> None:
        """
        Args:
            max_bytes: what all listings together may hold.
            max_per_principal: listings of one principal; one more lets go of its oldest.
            ttl_s: how long one is kept after the last page that was read of it.
        """
        self._max_bytes = max_bytes
        self._max_per_principal = max_per_principal
        self._ttl_s = ttl_s
        self._clock = clock
        self._new_name = new_name
        self._kept: dict[str, Kept] = {}  # the longest unread first
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all that are kept."""
        return self._nbytes

    def keep(
        self,
        principal: str,
        question: bytes,
        listed: Listed,
        nbytes: int,
        revision: Revision,
        *,
        full: bool,
    ) -> Kept:
        """Keep a listing. Others may have to go for it: those whose time is over, then of its own
        principal, then of whoever keeps most. InvalidRequest if it is too large to be kept."""
        if nbytes > self._max_bytes:
            raise InvalidRequest(
                f"the {len(listed)} rows that are listed have {nbytes} bytes, and at most "
                f"{self._max_bytes} are kept between pages: list fewer, by `where`, `since` or "
                "`limit`, or with fewer `columns`"
            )
        self.sweep()
        mine = [kept for kept in self._kept.values() if kept.principal == principal]
        for kept in mine[: max(0, len(mine) + 1 - self._max_per_principal)]:
            self._drop(kept)
        while self._kept and self._nbytes + nbytes > self._max_bytes:
            self._drop(self._oldest_of_largest())
        kept = Kept(self._new_name(), principal, question, listed, nbytes, revision, full=full)
        self._kept[kept.name] = kept
        self._nbytes += nbytes
        self._read(kept)
        return kept

    def find(self, token: str, principal: str, question: bytes) -> tuple[Kept, int]:
        """The listing that a token names, and the place in it.

        Raises:
            TooOld: it is not kept any more; or it is somebody else's, which nobody is told.
            InvalidRequest: the token is none, or the question is another one.
        """
        self.sweep()
        name, _, digits = token.rpartition(".")
        if not name or len(token) > MAX_TOKEN or not (digits.isascii() and digits.isdigit()):
            raise InvalidRequest(f"page_token is that of an earlier page, not {token!r:.80}")
        kept = self._kept.get(name)
        if kept is None or kept.principal != principal:
            raise TooOld(
                f"the rest of this listing is not kept any more: it is for {self._ttl_s:g} s after "
                "the last page, as long as there is room. List again without a page_token; with "
                "`since`, the revision of the pages before, only what changed is listed"
            )
        if kept.question != question:
            raise InvalidRequest(
                "page_token is of another question: everything but it and page_size is the same "
                "as for the page before"
            )
        offset = int(digits)
        if offset > len(kept.listed):
            raise InvalidRequest(f"page_token is that of an earlier page, not {token!r:.80}")
        self._read(kept)
        return kept, offset

    def sweep(self) -> None:
        """Let go of those whose time is over."""
        now = self._clock()
        while self._kept:
            first = next(iter(self._kept.values()))
            if first.until > now:
                return
            self._drop(first)

    def close(self) -> None:
        """Let go of all."""
        self._kept.clear()
        self._nbytes = 0

    def _read(self, kept: Kept) -> None:
        kept.until = self._clock() + self._ttl_s
        self._kept[kept.name] = self._kept.pop(kept.name)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.name]
        self._nbytes -= kept.nbytes

    def _oldest_of_largest(self) -> Kept:
        sums: dict[str, int] = {}
        for kept in self._kept.values():
            sums[kept.principal] = sums.get(kept.principal, 0) + kept.nbytes
        largest = max(sums, key=sums.__getitem__)
        return next(kept for kept in self._kept.values() if kept.principal == largest)
