"""What a controller knows of one trajectory: its key and its tags, never a tensor.

Owns the reading of a trajectory's tags and the refusal of rows whose producer did not write them.
Letters: P prompt tokens, R response tokens, N = P + R.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

Tags: TypeAlias = Mapping[str, object]
"""The tags of one key."""

COMPLETED: Final = "completed"
"""The one status whose rows are trained."""

LAYOUTS: Final = ("1d", "mrope_3d")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory, as its tags describe it."""

    key: str
    uid: str
    """The prompt that it answers."""
    session_id: int | str
    """Which run of the agent loop for that prompt; its trajectories share one reward."""
    index: int
    """Which of the trajectories of its session."""
    status: str
    score: float | None
    prompt_len: int
    response_len: int
    """Tokens after the prompt, tool and environment tokens included."""
    seq_len: int
    """N; a planner packs N - 1."""
    policy_len: int
    """Supervised entries of labels[1:]."""
    min_global_steps: int | None = None
    max_global_steps: int | None = None
    policy_spans: tuple[tuple[int, int], ...] = ()
    """(policy version, supervised tokens) of each run of the response."""
    num_turns: int | None = None
    task_name: str | None = None
    data_source: str | None = None
    position_layout: str = "1d"
    has_rollout_logprobs: bool = False
    has_routed_experts: bool = False
    has_multi_modal_inputs: bool = False
    shared: str | None = None
    """Key under which lies what its group has in common: images of the prompt."""
    is_padding: bool = False

    @property
    def train_len(self) -> int:
        """Length as it is trained: the last token is only ever a label."""
        return self.seq_len - 1

    @classmethod
    def of(
        cls,
        key: str,
        tags: Tags,
        fields: Collection[str] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> Trajectory:
        """Read a row's tags.

        Lengths are asked of completed rows only: a failed session leaves a row of tags alone.

        Args:
            fields: fields that the row has. Where the flags `has_rollout_logprobs` and
                `has_routed_experts` are missing, they say so.
            lengths: length of each field's row, -1 where it has none; says the same.

        Raises:
            ValueError: a tag is missing or is no such value; names the key and the tag.
        """
        read = _Reader(key, tags)
        status = read.text("status")
        lengthy = status == COMPLETED
        prompt_len = read.count("prompt_len", due=lengthy)
        response_len = read.count("response_len", due=lengthy)
        seq_len = read.count("seq_len", due=lengthy)
        policy_len = read.count("policy_len", due=lengthy)
        if seq_len != prompt_len + response_len:
            raise read.wrong(
                "seq_len", f"{prompt_len} prompt and {response_len} response tokens together"
            )
        if policy_len > max(seq_len - 1, 0):
            raise read.wrong("policy_len", f"at most the {seq_len} tokens of the row less one")
        present = {name for name, size in (lengths or {}).items() if size >= 0}.union(fields or ())
        layout = read.text("position_layout", "1d")
        if layout not in LAYOUTS:
            raise read.wrong("position_layout", f"one of {', '.join(LAYOUTS)}")
        return cls(
            key=key,
            uid=read.text("uid"),
            session_id=read.session(),
            index=read.count("index"),
            status=status,
            score=read.score(),
            prompt_len=prompt_len,
            response_len=response_len,
            seq_len=seq_len,
            policy_len=policy_len,
            min_global_steps=read.step("min_global_steps"),
            max_global_steps=read.step("max_global_steps"),
            policy_spans=read.spans(),
            num_turns=read.step("num_turns"),
            task_name=read.optional_text("task_name"),
            data_source=read.optional_text("data_source"),
            position_layout=layout,
            has_rollout_logprobs=read.flag("has_rollout_logprobs", "logprobs" in present),
            has_routed_experts=read.flag("has_routed_experts", "routed_experts" in present),
            has_multi_modal_inputs="multi_modal_inputs" in present,
            shared=read.optional_text("shared"),
            is_padding=read.flag("is_padding", False),
        )


@dataclass(frozen=True, slots=True)
class BatchTraits:
    """What every worker must know of the whole batch, whatever rows it has itself.

    Workers meet in one collective per field, so a rank whose packs are all empty needs the fields
    that other ranks have.
    """

    position_layout: str = "1d"
    """mrope_3d if any row has three axes: then every row gets three."""
    has_rollout_logprobs: bool = False
    has_routed_experts: bool = False

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> BatchTraits:
        """The traits of a batch: what any of its rows has."""
        rows = list(trajectories)
        return cls(
            "mrope_3d" if any(row.position_layout == "mrope_3d" for row in rows) else "1d",
            any(row.has_rollout_logprobs for row in rows),
            any(row.has_routed_experts for row in rows),
        )


class _Reader:
    """Takes values out of one row's tags, and says whose tag was wrong."""

    def __init__(self, key: str, tags: Tags) -> None:
        self._key = key
        self._tags = tags

    def missing(self, tag: str) -> ValueError:
        return ValueError(
            f"key {self._key!r} has no tag {tag!r}: its producer did not call write_train_meta"
        )

    def wrong(self, tag: str, wanted: str) -> ValueError:
        value = self._tags.get(tag)
        return ValueError(f"tag {tag!r} of key {self._key!r} is {value!r:.80}, not {wanted}")

    def text(self, tag: str, default: str | None = None) -> str:
        value = self._tags.get(tag, default)
        if value is None:
            raise self.missing(tag)
        if not isinstance(value, str):
            raise self.wrong(tag, "a string")
        return value

    def optional_text(self, tag: str) -> str | None:
        return None if self._tags.get(tag) is None else self.text(tag)

    def count(self, tag: str, *, due: bool = True) -> int:
        value = self.step(tag)
        if value is None:
            if due:
                raise self.missing(tag)
            return 0
        return value

    def step(self, tag: str) -> int | None:
        value = self._tags.get(tag)
        if value is not None and not _is_count(value):
            raise self.wrong(tag, "a number from 0 on")
        return cast("int | None", value)

    def session(self) -> int | str:
        value = self._tags.get("session_id")
        if value is None:
            raise self.missing("session_id")
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise self.wrong("session_id", "a number or a string")
        return value

    def score(self) -> float | None:
        value = self._tags.get("score")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong("score", "a number")
        return float(value)

    def flag(self, tag: str, default: bool) -> bool:
        value = self._tags.get(tag)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(tag, "true or false")
        return value

    def spans(self) -> tuple[tuple[int, int], ...]:
        value = self._tags.get("policy_spans")
        if value is None:
            return ()
        spans: list[tuple[int, int]] = []
        for span in cast("list[object]", value) if isinstance(value, (list, tuple)) else [value]:
            pair = cast("list[int]", span) if isinstance(span, (list, tuple)) else []
            if len(pair) != 2 or not all(map(_is_count, pair)):
                raise self.wrong("policy_spans", "[[policy version, supervised tokens], ...]")
            spans.append((pair[0], pair[1]))
        return tuple(spans)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
