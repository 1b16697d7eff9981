"""One prompt to be worked on, as plain data: what a manager hands to a worker. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from agentloop.trajectory.state import Message, RolloutState


@dataclass(frozen=True, slots=True)
class GroupJob:
    """A group to generate: n sessions of one prompt."""

    uid: str
    partition_id: str
    task: str
    n: int
    global_steps: int
    """Trainer step at submission."""
    messages: list[Message]
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """The dataset's row: ground truth, arguments of tools and environments."""
    data_source: str | None = None
    prompt_ids: list[int] | None = None  # [P]
    train_prompt_ids: list[int] | None = None  # [P] with every image token, where that differs
    shared: bool = False
    """Whether values that its trajectories share lie under the prompt's key."""
    greedy: bool = False
    """Whether sessions take the likeliest token each time, whatever their task says."""
    attempt: int | None = None
    """Of a group that was interrupted and is to be gone on with."""
    tries: int = 0
    """How many workers were lost over it."""

    def plain(self) -> dict[str, Any]:
        """It as a map of plain data."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> GroupJob:
        """The job of such a map. What it does not know is left out: a newer version wrote it."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})

    def states(self) -> list[RolloutState]:
        """The sessions, as they begin."""
        return [
            RolloutState(
                messages=[dict(message) for message in self.messages],
                uid=self.uid,
                session_id=session_id,
                task_name=self.task,
                data_source=self.data_source,
                row=dict(self.row),
                prompt_ids=None if self.prompt_ids is None else list(self.prompt_ids),
                train_prompt_ids=(
                    None if self.train_prompt_ids is None else list(self.train_prompt_ids)
                ),
            )
            for session_id in range(self.n)
        ]

    def prompt_tags(self) -> dict[str, Any]:
        """Tags of the prompt's row before its group begins."""
        tags = {
            "is_prompt": True, "status": "pending", "uid": self.uid, "n": self.n,
            "global_steps": self.global_steps, "task_name": self.task,
        }  # fmt: skip
        if self.data_source is not None:
            tags["data_source"] = self.data_source
        return tags

    def prompt_fields(self) -> dict[str, Any]:
        """The dataset's row as fields of the prompt's row; `of_prompt` reads them."""
        extra = {
            "row": self.row,
            "prompt_ids": self.prompt_ids,
            "train_prompt_ids": self.train_prompt_ids,
            "shared": self.shared,
            "greedy": self.greedy,
        }
        return {"messages": self.messages, "extra": extra}

    @classmethod
    def of_prompt(
        cls,
        partition_id: str,
        tags: Mapping[str, Any],
        fields: Mapping[str, Any],
        global_steps: int,
    ) -> GroupJob:
        """The job that a stored prompt's row describes, for a trainer step."""
        extra: Mapping[str, Any] = fields["extra"]
        return cls(
            uid=tags["uid"],
            partition_id=partition_id,
            task=tags["task_name"],
            n=tags["n"],
            global_steps=global_steps,
            messages=fields["messages"],
            row=extra["row"],
            data_source=tags.get("data_source"),
            prompt_ids=extra["prompt_ids"],
            train_prompt_ids=extra["train_prompt_ids"],
            shared=extra["shared"],
            greedy=extra.get("greedy", False),
        )
