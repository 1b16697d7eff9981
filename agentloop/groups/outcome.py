"""What became of one group, as plain data that a worker sends to its manager. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentloop.trajectory.state import Status, group_status

UNKNOWN_FAILURE: Final = "session"
"""The kind of a failure that nobody named."""


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    """What became of one trajectory of a group."""

    status: Status
    new_tokens: int
    """Tokens of its response that came in this call."""
    score: float | None = None
    failure: str | None = None
    """What kind of thing failed, if it did."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of a group in one call."""

    uid: str
    task: str
    status: Status
    """`filtered` if it was completed and refused; `archived` if somebody else has the prompt."""
    members: tuple[MemberOutcome, ...] = ()
    attempt: int | None = None
    """Of a group that may be gone on with."""
    group_generate_time_s: float | None = None
    """Wall time of the call."""
    error_msg: str | None = None
    """Why it could not be run at all."""

    @classmethod
    def failed(cls, uid: str, task: str, n: int, reason: str, kind: str = "worker") -> GroupOutcome:
        """A group that could not be run at all: all of its sessions have failed."""
        member = MemberOutcome(Status.FAILED, 0, None, kind)
        return cls(uid, task, Status.FAILED, (member,) * n, error_msg=reason)

    @classmethod
    def superseded(cls, uid: str, task: str) -> GroupOutcome:
        """A group that is not this worker's any more: it counts for nothing."""
        return cls(uid, task, Status.ARCHIVED)

    @classmethod
    def of_tags(
        cls,
        uid: str,
        task: str,
        prompt: Mapping[str, Any],
        members: Sequence[Mapping[str, Any]],
    ) -> GroupOutcome:
        """The outcome of a group that has ended, from the tags of its rows."""
        outcomes = tuple(
            MemberOutcome(
                status=Status(tags["status"]),
                new_tokens=tags.get("response_len", 0),
                score=tags.get("score"),
                failure=UNKNOWN_FAILURE if tags["status"] == Status.FAILED else None,
            )
            for tags in members
        )
        status = Status.COMPLETED
        if prompt.get("status") != "finished":
            status = group_status(member.status for member in outcomes or (_LOST,))
            if status is not Status.FILTERED:  # whatever its rows are, it was ended as a failure
                status = Status.FAILED
        times = [
            tags["group_generate_time_s"] for tags in members if "group_generate_time_s" in tags
        ]
        return cls(uid, task, status, outcomes, None, times[0] if times else None)

    def plain(self) -> dict[str, Any]:
        """It as a map of plain data."""
        return {
            "uid": self.uid,
            "task": self.task,
            "status": str(self.status),
            "members": [
                {
                    "status": str(member.status),
                    "new_tokens": member.new_tokens,
                    "score": None if member.score is None else float(member.score),
                    "failure": member.failure,
                }
                for member in self.members
            ],
            "attempt": self.attempt,
            "group_generate_time_s": self.group_generate_time_s,
            "error_msg": self.error_msg,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> GroupOutcome:
        """The outcome of such a map."""
        members = tuple(
            MemberOutcome(
                Status(member["status"]), member["new_tokens"], member["score"], member["failure"]
            )
            for member in plain["members"]
        )
        return cls(
            plain["uid"],
            plain["task"],
            Status(plain["status"]),
            members,
            plain["attempt"],
            plain["group_generate_time_s"],
            plain["error_msg"],
        )


_LOST: Final = MemberOutcome(Status.FAILED, 0)
