"""One trajectory while it is being made: what an agent loop knows of it. No I/O.

Owns the states that a trajectory goes through and keeps its per-token lists equally long. What is
published of it is made by `canonicalize.py`.

Letters: P prompt tokens, R response tokens (tool and environment tokens included), N = P + R.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.fields import IGNORED

Message: TypeAlias = dict[str, Any]
"""One chat message: role, content, and for tools tool_calls or tool_call_id."""


class Status(StrEnum):
    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    """Stopped from outside with what it had; may be continued."""
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


_STATUS_OF: Final = {
    "stop": Status.COMPLETED,
    "length": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "abort": Status.ABORTED,
}


def status_of(finish_reason: str | None) -> Status:
    """The status that an engine's finish reason means; what is not known has failed.

    Example: status_of("STOP") == "completed", status_of("abort") == "aborted",
    status_of(None) == "failed".
    """
    return _STATUS_OF.get((finish_reason or "").lower(), Status.FAILED)


def group_status(statuses: Iterable[Status]) -> Status:
    """The status of a group by its members': the first of failed, aborted, expired, filtered that
    any has, else completed.

    Raises:
        ValueError: a member has not run, or there is none: no such group is trained.
    """
    members = set(statuses)
    for status in (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED):
        if status in members:
            return status
    if members != {Status.COMPLETED}:
        raise ValueError(f"a group of members {sorted(members)} has no status yet")
    return Status.COMPLETED


def trajectory_key(uid: str, session_id: int, index: int) -> str:
    """The key under which a trajectory is stored. Keys are never parsed: the parts are tags.

    Different trajectories have different keys as long as a uid is used once in a run: neither
    number holds an underscore.

    Raises:
        ValueError: there is no uid, or a number is below 0.
    """
    if not uid or session_id < 0 or index < 0:
        raise ValueError(
            f"a trajectory needs a uid, and a session and an index from 0 on, not {uid!r}, "
            f"{session_id} and {index}"
        )
    return f"{uid}_{session_id}_{index}"


@dataclass(frozen=True, slots=True)
class Canonical:
    """The full sequence, as it is published. Index i belongs to token i."""

    input_ids: list[int]  # [N]
    labels: list[int]  # [N], -100 where nothing is supervised
    logprobs: list[float] | None  # [N], 0.0 where nothing was generated


@dataclass(frozen=True, slots=True)
class TrainMeta:
    """What a planner may know of a trajectory: written by `write_train_meta`, published as tags."""

    prompt_len: int
    response_len: int
    seq_len: int
    """N; a planner packs N - 1."""
    policy_len: int
    """Supervised entries of labels[1:]."""
    policy_spans: tuple[tuple[int, int], ...]
    """(policy version, supervised tokens) of each run of the response; () if it names none."""
    min_global_steps: int | None
    max_global_steps: int | None
    position_layout: str
    has_rollout_logprobs: bool
    has_routed_experts: bool


@dataclass(slots=True)
class RolloutState:
    """One trajectory of a session."""

    messages: list[Message]
    """The prompt as chat messages."""
    uid: str = ""
    session_id: int = 0
    index: int = 0
    task_name: str = ""
    data_source: str | None = None
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """The dataset's row: ground truth, arguments of tools and environments."""

    prompt_ids: list[int] | None = None  # [P]
    """What the engine is asked with. Never changed while a session runs."""
    train_prompt_ids: list[int] | None = None  # [P] with every image token, where that differs
    position_ids: npt.NDArray[np.int64] | None = None  # [3, P] of a multimodal training prompt
    multi_modal_inputs: dict[str, Any] | None = None

    conversation: list[Message] | None = None
    """All of it, from its prompt to the last finished turn; None if no loop has kept one, and then
    it is the prompt and `response`. See `dialogue`."""
    response: str | None = None
    """Text of the last answer."""
    response_ids: list[int] | None = None  # [R]
    generated: list[bool] | None = None  # [R], False where a tool or environment put the token
    """None: the policy generated every token."""
    response_logprobs: list[float] | None = None  # [R], 0.0 where inserted
    response_model_steps: list[int] = field(default_factory=list[int])  # [R]
    """The policy version that each token was generated by, or came after."""
    routed_experts: npt.NDArray[Any] | None = None  # [N-1, layers * topk]
    ids_source: str = "engine"
    logprob_kind: str | None = None
    """Which distribution the log-probs are of: raw, processed or recomputed."""
    num_turns: int = 0
    finish_reason: str | None = None

    status: Status = Status.INIT
    error_msg: str | None = None
    failure: str | None = None
    """What kind of thing failed, for counting: one of few words."""
    reward: dict[str, Any] | None = None
    """`score`, and whatever else the judge said."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    canonical: Canonical | None = None
    meta: TrainMeta | None = None

    @property
    def dialogue(self) -> list[Message]:
        """The whole conversation, as it is judged and published in the field `messages`."""
        if self.conversation is not None:
            return self.conversation
        answer = [{"role": "assistant", "content": self.response}] if self.response else []
        return [*self.messages, *answer]

    @property
    def key(self) -> str:
        """The key under which it is stored."""
        return trajectory_key(self.uid, self.session_id, self.index)

    # -- the response grows ------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Everything so far: what the engine is asked with next."""
        return [*(self.prompt_ids or ()), *(self.response_ids or ())]

    @property
    def turn_ids(self) -> list[int]:
        """What the policy has generated since something was inserted: its last turn so far."""
        ids, mask = self.response_ids or [], self.generated
        if mask is None:
            return ids
        begin = len(mask)
        while begin and mask[begin - 1]:
            begin -= 1
        return ids[begin:]

    def append_generated(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        versions: Sequence[int],
    ) -> None:
        """The policy generated these tokens. Each has its log-prob, or no token of the row has.

        Raises:
            ValueError: the lists differ in length, log-probs are there for a part of the response
                only, or an earlier token has no version; nothing is appended.
        """
        self._check_versions()
        if len(versions) != len(token_ids):
            raise ValueError(f"{len(versions)} policy versions for {len(token_ids)} tokens")
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
        if not token_ids:  # a turn that was ended before it began says nothing of log-probs
            self.response_ids = self.response_ids or []
            return
        if (logprobs is None) != (self.response_logprobs is None) and any(self._mask()):
            raise ValueError("some turns of the response have log-probs and some have none")
        before = len(self.response_ids or ())
        if logprobs is None:
            self.response_logprobs = None
        else:
            known = self.response_logprobs if self.response_logprobs is not None else [0.0] * before
            self.response_logprobs = [*known, *map(float, logprobs)]
        self._append(token_ids, True, versions)

    def append_inserted(self, token_ids: Sequence[int], version: int) -> None:
        """A tool, an environment or the chat template put these tokens: never supervised.

        `version` is the policy version that they came after.

        Raises:
            ValueError: an earlier token has no version; nothing is appended.
        """
        self._check_versions()
        if self.response_logprobs is not None:
            self.response_logprobs = [*self.response_logprobs, *([0.0] * len(token_ids))]
        self._append(token_ids, False, [version] * len(token_ids))

    def truncate(self, response_len: int) -> None:
        """Cut the response to its first `response_len` tokens."""
        self.response_ids = (self.response_ids or [])[:response_len]
        self.generated = None if self.generated is None else self.generated[:response_len]
        if self.response_logprobs is not None:
            self.response_logprobs = self.response_logprobs[:response_len]
        self.response_model_steps = self.response_model_steps[:response_len]
        if self.routed_experts is not None:
            prompt = self.train_prompt_ids if self.train_prompt_ids is not None else self.prompt_ids
            inputs = len(prompt or ()) + len(self.response_ids) - 1
            self.routed_experts = self.routed_experts[: max(inputs, 0)]
        self._reopen()

    def fill_versions(self, version: int) -> None:
        """Tokens of the response that have no policy version yet were made by this one."""
        missing = len(self.response_ids or ()) - len(self.response_model_steps)
        if missing > 0:
            self.response_model_steps = [*self.response_model_steps, *([version] * missing)]
            self._reopen()

    def _check_versions(self) -> None:
        unknown = len(self.response_ids or ()) - len(self.response_model_steps)
        if unknown:
            raise ValueError(
                f"{unknown} tokens of the response have no policy version: name it by "
                f"fill_versions before more tokens follow"
            )

    def _mask(self) -> list[bool]:
        return (
            self.generated if self.generated is not None else [True] * len(self.response_ids or ())
        )

    def _append(self, token_ids: Sequence[int], generated: bool, versions: Sequence[int]) -> None:
        mask = self._mask()
        if not generated or self.generated is not None:
            self.generated = [*mask, *([generated] * len(token_ids))]
        self.response_ids = [*(self.response_ids or ()), *token_ids]
        self.response_model_steps = [*self.response_model_steps, *versions]
        self._reopen()

    def _reopen(self) -> None:
        """A response that changes has no canonical form until it is made again."""
        self.canonical = None
        self.meta = None

    # -- it ends -----------------------------------------------------------------------------

    def fail(self, reason: str, kind: str = "session") -> None:
        """It came to nothing, and this is why; `kind` is a word that failures are counted by."""
        self.status = Status.FAILED
        self.error_msg = reason
        self.failure = kind

    def leave_completed(self, status: Status) -> None:
        """It is not completed after all, and may go on: what was canonical is made anew.

        A response whose mask and log-probs only the canonical form had keeps them.
        """
        self.status = status
        canonical, size = self.canonical, len(self.response_ids or ())
        if canonical is not None and size:
            if self.generated is None:
                mask = [label != IGNORED for label in canonical.labels[-size:]]
                self.generated = None if all(mask) else mask
            if self.response_logprobs is None and canonical.logprobs is not None:
                self.response_logprobs = canonical.logprobs[-size:]
        self._reopen()

    def reset(self) -> None:
        """Ready to run again from its prompt: nothing of the response is left.

        The status stays as it is, and so does everything that is known of the prompt.
        """
        self.conversation = None
        self.response = ""
        self.response_ids = []
        self.generated = None
        self.response_logprobs = None
        self.response_model_steps = []
        self.routed_experts = None
        self.ids_source = "engine"
        self.logprob_kind = None
        self.num_turns = 0
        self.finish_reason = None
        self.error_msg = None
        self.failure = None
        self.reward = None
        self._reopen()

    def discard(self) -> None:
        """Nothing will come of it: only the prompt's messages are left, and it has not run."""
        for its in fields(self):
            if its.name != "messages":
                made = its.default_factory
                setattr(self, its.name, its.default if made is MISSING else made())
