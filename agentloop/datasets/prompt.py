"""One prompt of a dataset, and what a dataset is. Owns the seam between data and producers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentloop.trajectory.state import Message


class DatasetError(ValueError):
    """A dataset cannot be read, or has a row that is no prompt; the message says which."""


class Tokenizer(Protocol):
    """What datasets need of `agentloop.loops.chat.ChatTokenizer`."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The tokens of a conversation, up to where the policy begins to write."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready for a group of sessions. Its maps are its own: nobody else holds them."""

    index: int
    """Its row in the files or the task, whatever was left out."""
    messages: list[Message]
    row: dict[str, Any]
    """The row's other columns, as plain data: ground truth, arguments of tools, and whatever was
    there. Its `data_source` may be a map of judges and weights."""
    data_source: str | None
    """The name that metrics go by."""
    prompt_ids: list[int]  # [P]
    multi_modal_inputs: dict[str, Any] | None = None
    """Columns of media, as the file has them."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Schemas of the tools that this prompt may use, from its own row."""

    uid: str = ""
    """Of this draw: unique in the run. "" before a sampler drew it."""
    group_id: int = -1
    """How many prompts the sampler had drawn before."""
    epoch: int = 0
    rollout_ids: tuple[int, ...] = ()
    """One for each session of the group; not unique over restarts, unlike `uid`."""


class Dataset(Protocol):
    """A fixed list of prompts."""

    overlong: int
    """Rows left out because their prompts have too many tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> PromptRow: ...
