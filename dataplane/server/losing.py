"""Loss at the tag store: what went with a value store is written down, and told to who waits.

When something is lost is decided by who has evidence: a store that came back without some of its
blocks, or Ray, which says that its node is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from dataplane.errors import quote
from dataplane.tags import journal as j
from dataplane.tags.lost import find_losses

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

log = logging.getLogger("dataplane.tags")


class Losing:
    """Lets rows be lost."""

    def __init__(self, service: TagService) -> None:
        self._service = service

    def lose(self, store_id: str, blocks: Collection[int] | None) -> int:
        """These blocks of a value store are gone for good, or with None all that it had; how many
        rows are lost with them. Once more, it does nothing.

        A load of a checkpoint that has put any of them is given up. InternalError or QuotaExceeded:
        the journal takes no more, and no row is lost yet; say it again.
        """
        service, store = self._service, self._service.store
        losses = find_losses(store, store_id, blocks)
        restorer = service.checkpointing.restorer
        if any(map(losses.names, restorer.placements())):
            log.warning(
                "a load is given up: value store %s lost some of it",
                store_id, extra={"store": store_id},
            )  # fmt: skip
            restorer.abandon()
        if losses.placements or any(map(losses.names, store.dead)):
            now = service.clock()
            change = (store_id, None if losses.blocks is None else sorted(losses.blocks))
            service.journal.append(j.LOST, store.n_after_loss(losses), now, change)
            store.apply_lost(losses, now)
        if blocks is None:
            service.freeing.forget(store_id)
        service.totals.rows_lost += losses.rows
        if losses.rows:
            log.warning(
                "%d rows of %d partitions (%s) are lost: value store %s %s",
                losses.rows, len(losses.positions),
                quote(partition.partition_id for partition in losses.positions), store_id,
                "is gone" if blocks is None else f"has not got {len(blocks)} blocks any more",
                extra={"rows": losses.rows, "store": store_id},
            )  # fmt: skip
        return losses.rows
