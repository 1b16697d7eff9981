"""What comes of a call of a rank: a value, or an error in words. Errors of other processes are not
unpickled."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.ranks.collectives import PeerFailed, PeersLost


class RankError(RuntimeError):
    """A rank raised. `usable` says whether the group still is: it is where all ranks came back."""

    def __init__(self, rank: int, kind: str, message: str, *, usable: bool) -> None:
        super().__init__(rank, kind, message)
        self.rank = rank
        self.kind = kind
        """Name of the class of what it raised."""
        self.message = message
        self.usable = usable

    def __str__(self) -> str:
        rest = "" if self.usable else "; the ranks were ended: start new ones"
        return f"rank {self.rank}: {self.kind}: {self.message}{rest}"


class RankLost(RuntimeError):
    """A rank's process is gone, and the others were ended with it: start new ones."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} is gone, and the others were ended with it: {self.reason}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a rank."""

    kind: str
    message: str
    shared: bool
    """Whether all ranks are known to raise."""
    is_echo: bool
    """Whether it only tells of another rank's."""
    trace: str = ""
    """Where it came from, for a person."""

    @classmethod
    def of(cls, error: BaseException, *, shared: bool = False) -> Failure:
        """In words."""
        return cls(
            type(error).__name__,
            str(error),
            shared or isinstance(error, PeerFailed),
            isinstance(error, (PeerFailed, PeersLost)),
            "".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank answered."""

    value: Any = None
    failure: Failure | None = None
    is_alone: bool = False
    """Whether the rank has lost the others, so that the group is of no more use."""

    @classmethod
    def of(
        cls, work: Callable[[], Any], *, shares: Callable[[BaseException], bool] | None = None
    ) -> Outcome:
        """What comes of it. `shares` tells errors that all ranks raise."""
        try:
            return cls(work())
        except Exception as error:
            shared = shares is not None and shares(error)
            failure = Failure.of(error, shared=shared)
            return cls(failure=failure, is_alone=isinstance(error, PeersLost))
