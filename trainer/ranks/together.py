"""What all ranks do or none, so that no rank waits in a collective for one that failed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from trainer.materialize import PackTensors
from trainer.ranks.collectives import PeerFailed, Peers, PeersLost


class Together:
    """Errors of one rank that become errors of all."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._shared: BaseException | None = None

    def agree(self, error: BaseException | None = None) -> None:
        """`Peers.agree`, remembering what it raised."""
        try:
            self._peers.agree(error)
        except PeersLost:
            raise
        except BaseException as raised:
            self._shared = raised
            raise

    def shares(self, error: BaseException) -> bool:
        """Whether the other ranks raise because of this error too."""
        return error is self._shared

    @contextmanager
    def step(self) -> Generator[None]:
        """Around work without collectives: what one rank raises in it, all do."""
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        self.agree(failed)


class AgreedPacks:
    """The packs between two collectives of all ranks, such as those of an optimizer step.

    Where ranks meet within each forward pass too (`each`), they agree before every one. Else they
    meet at the end alone, and agree once, before that: a rank that fails at its second pack leaves
    while others are at theirs, and those learn of it when they are through.
    """

    def __init__(
        self,
        together: Together,
        next_pack: Callable[[], PackTensors],
        count: int,
        *,
        each: bool,
        last: Callable[[], None] | None = None,
    ) -> None:
        """`last` follows the packs, and is to succeed on all ranks before weights move."""
        self._together = together
        self._next = next_pack
        self._count = count
        self._each = each
        self._last = last
        self._settled = False

    def __iter__(self) -> Iterator[PackTensors]:
        for _ in range(self._count):
            try:
                pack = self._next()
            except Exception as error:
                self._settle(error)
                raise
            if self._each:
                self._together.agree()
            yield pack
        try:
            if self._last is not None:
                self._last()
        except Exception as error:
            self._settle(error)
            raise
        self._settle()

    @contextmanager
    def consumed(self) -> Generator[None]:
        """Around what goes through the packs: what it raises between two of them other ranks learn
        as well, unless they wait within a forward pass for this one."""
        try:
            yield
        except Exception as error:
            told = self._settled or isinstance(error, (PeerFailed, PeersLost))
            if not told and not self._each:
                self._settle(error)
            raise

    def _settle(self, error: BaseException | None = None) -> None:
        self._settled = True
        self._together.agree(error)
