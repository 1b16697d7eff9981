"""The named points at which a process of a plane can be killed or stopped: one table. Pure.

A name is `role.verb.step`: whose process it is, which verb it is in the middle of, and how far it
has come. The steps of a change of the tag store are the same for each of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["tags", "values"]


class Point(NamedTuple):
    """A moment in the life of a process."""

    role: Role
    verb: str
    what: str
    """What has happened, and what has not."""


_ASKED = {
    "asked": "{} has arrived and nothing has been done about it",
    "unanswered": "{} has had all its effects, and its answer is not sent",
    "answered": "the answer of {} has left for the kernel",
}
_WRITTEN = {
    "unwritten": "{} is checked and about to be written to the journal",
    "torn": "half of the record of {} is in the journal (SIGKILL only)",
    "written": "{} is in the journal and nothing of it in memory",
}
_APPLIED = {"applied": "{} is in the journal and in memory, and nobody was told"}

CHANGES = ("put", "clear", "begin_group", "end_group")
CLAIMS = ("claim", "commit", "release")
LOADED = ("begin", "partition", "rows", "block", "state", "end")
"""Steps of the load of a checkpoint that are written to the journal."""
SAVED = ("open", "state", "rows", "close")
"""Requests of which the save of a checkpoint consists."""


def _family(role: Role, verb: str, subject: str, *steps: dict[str, str]) -> dict[str, Point]:
    return {
        f"{role}.{verb}.{step}": Point(role, verb, text.format(subject))
        for some in steps
        for step, text in some.items()
    }


def _table() -> dict[str, Point]:
    table: dict[str, Point] = {}
    for verb in CHANGES:
        table |= _family("tags", verb, f"a {verb}", _ASKED, _WRITTEN, _APPLIED)
    for verb in CLAIMS:
        table |= _family("tags", verb, f"a {verb}", _ASKED, _WRITTEN)
    table |= _family("tags", "repack", "a repack", _WRITTEN, _APPLIED)
    for step in SAVED:
        table |= _family("tags", f"save_{step}", f"the request checkpoint_{step} of a save", _ASKED)
    for step in LOADED:
        table |= _family("tags", f"load_{step}", f"the step {step!r} of a load", _WRITTEN)
    table |= _family("tags", "load_end", "the end of a load", _ASKED)
    table |= _family("tags", "snapshot", "a snapshot", {
        "unturned": "a snapshot begins: the journal has not gone on in a new file yet",
        "turned": "the journal has gone on in a new file, and the snapshot is not written",
        "unreplaced": "the snapshot is whole, and what it takes the place of still counts",
        "replaced": "the snapshot counts, and what it takes the place of is still there",
    })  # fmt: skip
    table |= _family("values", "reserve", "a reservation", _ASKED)
    table |= _family("values", "put_block", "a put through the socket", {
        "asked": "the header of a put through the socket has arrived, and it has no room yet",
        "part": "it has room, and the first bytes of its payload are there",
        "whole": "its payload is there, whole, and not published",
    })  # fmt: skip
    table |= _family("values", "allocate", "room", {
        "asked": "room for a block is wanted",
        "done": "a block has its room, and nobody knows",
    })  # fmt: skip
    table |= _family("values", "publish", "a publication", {
        "asked": "a writer has copied its block in place and asks for the publication",
        "sealed": "a block is sealed, and the tag store has not been asked to publish it",
        "sent": "the tag store has been asked to publish a block",
        "heard": "the tag store has published a block, and the value store has not noted it",
        "published": "the value store has noted the publication, and the writer is not answered",
        "unanswered": "the writer's answer is about to be sent",
        "answered": "the writer's answer has left for the kernel",
    })  # fmt: skip
    table |= _family("values", "abort", "the end of an unpublished block", {
        "asked": "a block that will not be published is about to be freed",
        "done": "a block that will not be published is freed",
    })  # fmt: skip
    table |= _family("values", "pin", "a pin", _ASKED, {
        "held": "the blocks of a pin or a read are held, and the reader does not know",
    })  # fmt: skip
    table |= _family("values", "read", "a read", _ASKED)
    table |= _family("values", "unpin", "an unpin", {
        "asked": "a reader lets go of its blocks, or a read has ended, and they are still held",
        "done": "they are not held any more",
    })  # fmt: skip
    table |= _family("values", "free", "the end of blocks", {
        "asked": "the tag store says that blocks are dead, and they are not freed",
        "done": "dead blocks are freed, and the tag store does not know",
    })  # fmt: skip
    table |= _family("values", "hold", "room for a group", {
        "asked": "the tag store wants room held for a group",
        "done": "it is held, or waited for, and the tag store does not know",
    })  # fmt: skip
    table |= _family("values", "repack", "a repack", {
        "sealed": "live rows are copied into a new block, and the tag store does not know",
        "done": "the tag store points to the new block, and the value store has not noted it",
    })  # fmt: skip
    return table


POINTS = _table()
"""Every point, by name."""
