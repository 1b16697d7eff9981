"""Groups that nobody will finish: they are open, and who began them has no connection any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.inspection import ClientReport

UNFINISHED = ("pending", "running")
"""The statuses of a prompt whose group may be open."""
MAX_GROUPS = 65_536
"""So many are named in one predicate; the oldest keys of a listing come first."""


class Orphan(NamedTuple):
    """An open group whose producer is gone."""

    uid: str
    attempt: int
    n: int
    sessions: int
    """Rows of it that are there."""
    producer: ClientReport
    age_s: float | None
    """Since its prompt changed last."""


def orphaned_groups(client: Client, partition: str) -> list[Orphan]:
    """The open groups of a partition whose producer has no connection, by uid."""
    prompts = client.kv_list(
        partition, where={"is_prompt": True, "status": {"in": list(UNFINISHED)}}, columns=[]
    )
    orphans = [
        Orphan(
            report.group["uid"], report.group["attempt"], report.group["n"],
            report.group["sessions"], report.producer, report.age_s,
        )
        for report in client.inspect(prompts.keys, partition)
        if report is not None
        and report.group is not None
        and report.group["open"]
        and not report.producer.alive
    ]  # fmt: skip
    return sorted(orphans, key=lambda orphan: orphan.uid)[:MAX_GROUPS]
