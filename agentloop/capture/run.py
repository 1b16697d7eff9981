"""One run: its turns so far, what is said of it, and what may still happen to it. No I/O.

    open ──end──▶ ending ──published──▶ ended
                    │ the plane could not be had
                    ▼
                  closed ──end──▶ ending

Owns these states and what of them a request meets. Only an open run takes chat requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

from agentloop.capture.ending import FINISHES, Identity, Verdict
from agentloop.capture.refusals import Refusal, conflict, invalid
from agentloop.capture.settings import RunLimits
from agentloop.capture.tree import Tree
from agentloop.capture.turn import RefusedTurn, Turn
from agentloop.rewards.scores import verdict as checked_reward
from agentloop.rewards.types import RewardError

Phase: TypeAlias = Literal["open", "ending", "closed", "ended"]

_RUN_BYTES: Final = 4096
"""What a run takes in memory beside its turns, generously."""


@dataclass(slots=True)
class Keyed:
    """A request with an idempotency key."""

    digest: str
    task: asyncio.Task[dict[str, Any]] | None = None
    """While it is under way."""
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the end of a run is answered with, however often it is asked."""

    body: Mapping[str, Any]
    refusal: tuple[int, str, str] | None = None
    """(status, code, message) where it came to nothing."""

    def answer(self) -> Mapping[str, Any]:
        """The body. Refusal: it came to nothing."""
        if self.refusal is not None:
            status, code, message = self.refusal
            raise Refusal(status, code, message, retry=False)
        return self.body


@dataclass(slots=True, eq=False)
class Run:
    """A run of an agent."""

    identity: Identity
    key: bytes
    """Its key, hashed."""
    version: int | None = None
    """Of the policy that was served when it began."""
    touched_s: float = 0.0
    """When somebody asked it for something last, on the capture's clock."""
    phase: Phase = "open"
    tree: Tree = field(default_factory=Tree)
    refused: list[RefusedTurn] = field(default_factory=list[RefusedTurn])
    verdict: Verdict = field(default_factory=Verdict)
    keyed: dict[str, Keyed] = field(default_factory=dict[str, Keyed])
    under_way: set[int] = field(default_factory=set[int])
    """Numbers of requests that are at the server."""
    next_number: int = 0
    nbytes: int = _RUN_BYTES
    outcome: Outcome | None = None
    ending: asyncio.Task[Outcome] | None = None

    @property
    def run_id(self) -> str:
        return self.identity.run_id

    # -- turns -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refusal: 409: it takes no more turns."""
        if self.phase != "open":
            raise conflict("run_ended", f"run {self.run_id} is {self.phase}: start another one")

    def begin_turn(self, limits: RunLimits, request_bytes: int) -> int:
        """A number for one more request of an open run. Refusal: 413: it is full."""
        turns = len(self.tree) + len(self.refused) + len(self.under_way)
        if turns >= limits.max_turns:
            raise Refusal(
                413, "run_full",
                f"run {self.run_id} has {turns} turns, the most that are kept: end it", retry=False,
            )  # fmt: skip
        if self.nbytes + request_bytes > limits.max_run_bytes:
            raise Refusal(
                413, "run_full",
                f"run {self.run_id} has {self.nbytes} bytes of {limits.max_run_bytes}: end it",
                retry=False,
            )  # fmt: skip
        number = self.next_number
        self.next_number += 1
        self.under_way.add(number)
        return number

    def add(self, turn: Turn | RefusedTurn) -> None:
        """Have one more turn."""
        if isinstance(turn, RefusedTurn):
            self.refused.append(turn)
        else:
            self.tree.add(turn)
            if turn.idempotency_key is not None and turn.digest is not None:
                self.keyed[turn.idempotency_key] = Keyed(turn.digest, answer=turn.answer)
        self.nbytes += turn.nbytes
        self.next_number = max(self.next_number, turn.number + 1)

    def undo(self, number: int) -> bool:
        """Have a turn no more whose answer nobody got; not if another goes on from it."""
        gone = [turn for turn in self.refused if turn.number == number]
        gone += [turn for turn in self.tree if turn.number == number and self.tree.remove(number)]
        self.refused = [turn for turn in self.refused if turn.number != number]
        self.nbytes -= sum(turn.nbytes for turn in gone)
        return bool(gone)

    # -- its end -----------------------------------------------------------------------------

    def judge(self, verdict: Verdict) -> None:
        """Say what is to be said at its end; a later word replaces an earlier one.

        Raises:
            Refusal: 409: it has ended, or is about to.
        """
        said = merged(self.verdict, verdict)
        # A part of a closed run may be published already, as it was judged then.
        settled = self.phase == "closed" and said != self.verdict
        if settled or self.phase not in ("open", "closed"):
            raise conflict("run_ended", f"run {self.run_id} is {self.phase}; its reward stays")
        self.verdict = said

    def check_ready(self) -> None:
        """Refusal: 409: it cannot end as a success, because nobody said its reward."""
        if self.verdict.reward is None and self.verdict.finish_reason not in ("abort", "error"):
            raise conflict(
                "no_reward",
                f"run {self.run_id} has no reward: give one, or end it with finish_reason abort "
                "or error",
            )

    def shrink(self, outcome: Outcome) -> None:
        """Nothing but the answer is kept of a run that has ended."""
        self.phase = "ended"
        self.outcome = outcome
        self.tree = Tree()
        self.refused = []
        self.keyed = {}
        self.ending = None
        self.nbytes = _RUN_BYTES

    # -- what is shown -----------------------------------------------------------------------

    def shown(self) -> dict[str, Any]:
        """Its turns and branches, for people and for tests."""
        identity = self.identity
        return {
            "run_id": identity.run_id,
            "uid": identity.uid,
            "session_id": identity.session_id,
            "attempt": identity.attempt,
            "status": self.phase,
            "reward": self.verdict.reward,
            "bytes": self.nbytes,
            "under_way": sorted(self.under_way),
            "turns": [
                {
                    "number": turn.number,
                    "parent": turn.parent,
                    "new_prompt_tokens": turn.begin,
                    "completion_tokens": len(turn.completion),
                    "finish_reason": turn.finish_reason,
                }
                for turn in self.tree
            ],
            "refused": [{"number": turn.number, "reason": turn.reason} for turn in self.refused],
            "branches": [
                {
                    "index": index,
                    "turns": [turn.number for turn in branch.path],
                    "shared": branch.shared,
                    "tokens": sum(len(turn.tokens) for turn in branch.path),
                    "differs_at": branch.differs_at,
                    "differs_from": branch.differs_from,
                }
                for index, branch in enumerate(self.tree.branches())
            ],
            **({} if self.outcome is None else {"outcome": self.outcome.body}),
        }


# -- what is said of a run -----------------------------------------------------------------------


def verdict_of(body: Mapping[str, Any]) -> Verdict:
    """What a body says of a run.

    Raises:
        Refusal: 400: the reward is no number or map with a score, the finish reason is none that
            is known, or `extra` is no map.
    """
    reward = body.get("reward")
    try:
        said = None if reward is None else checked_reward(reward)
    except RewardError as error:
        raise invalid(f"`reward`: {error}") from None
    finish = body.get("finish_reason")
    if finish is not None and finish not in FINISHES:
        raise invalid(f"`finish_reason` is one of {', '.join(FINISHES)}, not {finish!r:.60}")
    extra = body.get("extra")
    if extra is not None and not isinstance(extra, dict):
        raise invalid("`extra` is to be a JSON object")
    error = body.get("error")
    if error is not None and not isinstance(error, str):
        raise invalid("`error` is to be a text")
    kept = cast("dict[str, Any]", extra or {})
    return Verdict(said, finish, dict(kept), None if error is None else error[:2000])


def merged(before: Verdict, later: Verdict) -> Verdict:
    """Both, of which the later one counts where both say something."""
    return Verdict(
        before.reward if later.reward is None else later.reward,
        later.finish_reason or before.finish_reason,
        {**before.extra, **later.extra},
        later.error or before.error,
    )
