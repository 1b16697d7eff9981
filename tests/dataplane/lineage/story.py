"""A lineage told by hand: what the tag store would answer if these requests had come to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.lineage.assemble import assemble
from dataplane.lineage.rows import Finding, Trace

Shapes = Mapping[str, tuple[str, list[int]]]
"""dtype and shape of each field; the last dimension is ragged."""

UID = "7c1e"


class Story:
    """Requests in order, by one producer `c1` unless it is said otherwise."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.n = 0
        self.gone = 0
        self.present: list[list[Any]] = []

    @property
    def last(self) -> int:
        """The number of the last request."""
        return len(self.entries) - 1

    def _add(
        self, op: str, *, changes: bool, stage: str = "", client: str = "c1", **more: Any
    ) -> int:
        self.n += changes
        entry = {
            "number": len(self.entries), "n": self.n, "at": 1000.0 + len(self.entries),
            "stage": stage, "client": client, "op": op, "partition": "train", **more,
        }  # fmt: skip
        self.entries.append(entry)
        return self.last

    def put(
        self,
        rows: Mapping[str, tuple[Mapping[str, Any] | None, Shapes]],
        *,
        attempt: int | None = None,
        stage: str = "",
    ) -> int:
        """A put of these keys: tags and fields of each."""
        names: dict[str, str] = {}
        for _, shapes in rows.values():
            names |= {name: dtype for name, (dtype, _) in shapes.items()}
        columns = [[name, dtype, 0, True] for name, dtype in names.items()]
        listed = [
            [key, None if tags is None else dict(tags), [shapes[name][1] for name in names]]
            for key, (tags, shapes) in rows.items()
        ]
        return self._add(
            "put" if names else "tag", changes=True, columns=columns, rows=listed,
            attempt=attempt, store="s", block=len(self.entries), of=len(rows), stage=stage,
        )  # fmt: skip

    def tag(self, key: str, **tags: Any) -> int:
        """A put of tags alone."""
        return self.put({key: (tags, {})})

    def get(
        self, keys: Sequence[str], fields: Sequence[str], stage: str = "", client: str = "c1"
    ) -> int:
        return self._add(
            "get", changes=False, keys=list(keys), fields=list(fields), stage=stage, client=client
        )

    def clear(self, *keys: str, where: Any = None) -> int:
        named: dict[str, Any] = {"keys": list(keys)}
        if where is not None:
            named = {"where": where, "until": None}
        return self._add("clear", changes=True, retire=False, **named)

    def begin(self, uid: str = UID, n: int = 2) -> int:
        """The attempt that began."""
        self._add(
            "begin", changes=True, uid=uid, sessions=n, declared_bytes=0, keys=[uid],
            attempt=self.n + 1,
        )  # fmt: skip
        return self.n

    def end(self, attempt: int, status: str = "finished") -> int:
        return self._add("end", changes=True, attempt=attempt, status=status)

    def note(self, verb: str, of: int, keys: Sequence[str], field: str, hashes: list[bytes]) -> int:
        return self._add(
            "note", changes=False, verb=verb, of_n=self.entries[of]["n"], fields=[field],
            rows=[[key, [digest], []] for key, digest in zip(keys, hashes, strict=True)],
        )  # fmt: skip

    def refuse(self, key: str, verb: str, error: str) -> int:
        return self._add(
            "refuse", changes=False, verb=verb, error=error, message="too late", keys=[key],
            attempt=None, of=1,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        return {
            "entries": self.entries, "present": self.present, "gone": self.gone, "partial": False,
            "next": len(self.entries), "more": False, "detail": "on", "revision": [1, self.n],
            "clients": {"c1": ["agentloop (pid 7 on w3)", True], "c2": ["pid 9 on w4", True]},
        }  # fmt: skip

    def trace(self, uid: str | None = UID, key: str | None = None) -> Trace:
        return assemble(self.answer(), None, uid, key)

    def failures(self) -> list[Finding]:
        return self.trace().failed


def tags_of(session: int, **more: Any) -> dict[str, Any]:
    """Tags of a trajectory: 9 tokens of a prompt and 14 of a response, of which 10 count."""
    return {
        "uid": UID, "session_id": session, "index": 0, "status": "completed", "prompt_len": 9,
        "response_len": 14, "seq_len": 23, "policy_len": 10, "global_steps": 12,
        "min_global_steps": 11, "max_global_steps": 12, **more,
    }  # fmt: skip


TOKENS: Shapes = {"input_ids": ("int64", [23]), "labels": ("int64", [23])}


def key_of(session: int) -> str:
    return f"{UID}_{session}_0"


def whole_group() -> tuple[Story, int]:
    """A group of two that was submitted, generated and ended; and its attempt."""
    story = Story()
    story.tag(UID, is_prompt=True, status="pending", uid=UID, global_steps=12, n=2)
    attempt = story.begin()
    for session in range(2):
        story.put({key_of(session): (tags_of(session), TOKENS)}, attempt=attempt)
    story.end(attempt)
    return story, attempt
