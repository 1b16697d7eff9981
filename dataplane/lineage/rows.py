"""What a trace is made of: one row per request, key and field, and what was found of them.

Plain values with stable names; `dataclasses.asdict` makes JSON of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

TAGS: Final = "*tags*"
"""The field of rows about tags."""
KEY: Final = "*key*"
"""The field of rows about a key as a whole: that it was cleared, claimed, or refused."""
PLANE: Final = "*plane*"
"""The field of rows about the tag store itself: that it was started again, or loaded."""
CHANGES: Final = ("put", "tag", "begin", "end", "clear")


@dataclass(slots=True)
class TraceRow:
    """One request, as far as it concerns one key and one field of it."""

    number: int
    """Of the request, in the order in which the tag store took them."""
    n: int
    """The revision that it made, or at which it was answered."""
    ts: float
    """Seconds since 1970, by the tag store's clock."""
    stage: str
    """As the client said it, else as the fields written tell; empty where neither does."""
    op: str
    """put, tag, get, claim, commit, release, begin, end, clear, drop, lost, refuse, start, load."""
    status: str = "ok"
    """The class of the error, of what was refused."""
    uid: str | None = None
    session_id: int | None = None
    index: int | None = None
    """What the row's tags said then: keys are never parsed."""
    key: str = ""
    partition: str = ""
    field: str = ""
    producer: str = ""
    """Who wrote the value; empty where it is not known."""
    consumer: str = ""
    """Who read it; of a write, all who read it until it was written anew."""
    shape: list[int] | None = None
    layout: str = ""
    """`dense`, `jagged(dimension)` or `object`."""
    dtype: str = ""
    device: str = ""
    """Empty: values lie in memory of the host until a reader moves them, which no store sees."""
    len: int | None = None
    """Entries in the ragged dimension."""
    valid_len: int | None = None
    """Those that are no padding: all of them, as rows are stored."""
    mask_sum: int | None = None
    """Supervised tokens of the row then: its tag `policy_len`."""
    global_steps: int | None = None
    min_global_steps: int | None = None
    max_global_steps: int | None = None
    is_padding: bool = False
    gen: int = 0
    """How often the key had come to be: once more with each put after a clear."""
    bytes: int | None = None
    ms: float | None = None
    """None: how long a request took is known to its client only."""
    hash: str = ""
    preview: str = ""
    client: str = ""
    """The id of who asked."""
    tags: dict[str, Any] | None = None
    """What a tag row wrote."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says of a trace."""

    rule: int
    """Its number in docs/trace.md."""
    name: str
    status: str
    """`ok`, `failed`, or `not judged`."""
    text: str = ""
    """What is wrong, or why it cannot be judged."""
    records: list[int] = field(default_factory=list[int])
    """Of what failed: the numbers of the two requests that disagree."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened to a group, a key or a plane."""

    partition_id: str | None
    uid: str | None
    key: str | None
    rows: list[TraceRow]
    findings: list[Finding]
    """Every rule once, or once for each failure."""
    never_read: list[str]
    """Fields that were written for the group, and that nobody has read."""
    read_by_several: dict[str, int]
    """Fields that several clients read of the same key: how many at most."""
    open_keys: list[str]
    """Keys of the group that are there, though others of its keys were cleared after it ended."""
    present: list[str]
    """Keys of the group that are there."""
    status: str | None
    """The prompt's last status."""
    sessions: tuple[int, int | None]
    """How many sessions have trajectories, and how many there are to be."""
    gone: int
    """Requests that are not remembered any more: the oldest."""
    partial: bool
    """Whether rows may be older than what is remembered for another reason: a snapshot or a
    checkpoint was loaded."""
    next: int
    """Where a later trace goes on: its `since`."""
    detail: str
    """What the plane keeps: `on`, `hashes` or `previews`."""

    @property
    def failed(self) -> list[Finding]:
        """The findings that are failures."""
        return [finding for finding in self.findings if finding.status == "failed"]
