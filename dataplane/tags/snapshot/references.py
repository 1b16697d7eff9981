"""Accounts and placements by number, so that whatever refers to one of them says its number. Pure.

Rows, blocks and leases of one partition share accounts and placements. Each is written once, before
the first part that refers to it: those that the partition knows of first, the others (of a group
that has ended, or of a block that only an old answer speaks of) when they are met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from dataplane.codec.template import Template
from dataplane.errors import InternalError
from dataplane.tags.accounts import Account, Producer
from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.snapshot.format import ACCOUNTS, PLACEMENTS, Part

PIECE = 8192
"""Accounts or placements in one part at most ..."""
PIECE_BYTES = 16 << 20
"""... and where blocks have many rows, fewer."""

# What an account is: that of all rows, that of all rows for prompts, or a part of one of them.
# PRODUCER, PROMPTER and GROUP are those that the partition knows of, the others are not.
TOTAL, PROMPTS, PRODUCER, PROMPTER, GROUP, OTHER_PRODUCER, OTHER_GROUP = range(7)


class References:
    """The numbers of accounts and placements of one partition, while it is written."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._accounts: dict[Account, int] = {}
        self._placements: dict[Placement, int] = {}
        self._new_accounts: list[Account] = []
        self._new_placements: list[Placement] = []
        self.account(partition.account)
        self.account(partition.prompts)
        for account in (*partition.producers.values(), *partition.prompters.values()):
            self.account(account)
        for group in partition.groups.values():
            self.account(group)

    def account(self, account: Account) -> int:
        """The number of an account."""
        number = self._accounts.get(account)
        if number is None:
            if account.parent is not None:
                self.account(account.parent)
            number = self._accounts[account] = len(self._accounts)
            self._new_accounts.append(account)
        return number

    def placement(self, placement: Placement) -> int:
        """The number of a placement."""
        number = self._placements.get(placement)
        if number is None:
            number = self._placements[placement] = len(self._placements)
            self._new_placements.append(placement)
        return number

    def parts(self) -> Iterator[Part]:
        """Those that have got a number since the last time."""
        placements, self._new_placements = self._new_placements, []
        written = list(map(self._placements_part, _pieces(placements)))
        accounts, self._new_accounts = self._new_accounts, []
        for at in range(0, len(accounts), PIECE):
            yield [ACCOUNTS, list(map(self._account, accounts[at : at + PIECE]))]
        yield from written

    def _account(self, account: Account) -> list[Any]:
        partition = self._partition
        sums = [
            account.rows, account.tag_bytes, account.extent_bytes, account.held_bytes,
            account.held_rows,
        ]  # fmt: skip
        if type(account) is Group:
            known = partition.groups.get(account.uid) is account
            return [
                GROUP if known else OTHER_GROUP, sums, self.account(account.producer), account.uid,
                account.attempt, account.n, account.declared_bytes, account.store,
                account.kept_bytes, account.status, account.since, account.at, account.open,
            ]  # fmt: skip
        if type(account) is Producer:
            if partition.producers.get(account.client_id) is account:
                kind = PRODUCER
            elif partition.prompters.get(account.client_id) is account:
                kind = PROMPTER
            else:
                kind = OTHER_PRODUCER
            parent = self.account(account.parent or partition.account)
            return [kind, sums, parent, account.client_id]
        if account is partition.account or account is partition.prompts:
            return [TOTAL if account is partition.account else PROMPTS, sums]
        raise InternalError(f"an account of another partition than {partition.partition_id!r}")

    def _placements_part(self, placements: list[Placement]) -> Part:
        stores: dict[str, int] = {}
        templates: dict[Template, int] = {}
        charged: list[int] = []
        shares: list[Any] = []
        starts: list[int] = []
        positions: list[Any] = []
        for i, p in enumerate(placements):
            stores.setdefault(p.store, len(stores))
            templates.setdefault(p.template, len(templates))
            if isinstance(p.charged, dict):
                shares.append([i, [[self.account(a), nbytes] for a, nbytes in p.charged.items()]])
                charged.append(-2)
            else:
                charged.append(-1 if p.charged is None else self.account(p.charged))
            if isinstance(p.positions, range) and p.positions.step == 1:
                starts.append(p.positions.start if len(p.positions) else -1)
            else:
                starts.append(-1)
                if p.positions:
                    positions.append([i, list(p.positions)])
        blobs = [template.blob for template in templates]
        return [
            PLACEMENTS, list(stores), blobs, [stores[p.store] for p in placements],
            [p.block for p in placements], [p.segment for p in placements],
            [p.offset for p in placements], [p.nbytes for p in placements],
            [templates[p.template] for p in placements], [p.rows for p in placements],
            [p.lengths for p in placements], [p.live for p in placements], charged, shares, starts,
            positions,
        ]  # fmt: skip


def _pieces(placements: list[Placement]) -> Iterator[list[Placement]]:
    piece: list[Placement] = []
    nbytes = 0
    for placement in placements:
        piece.append(placement)
        nbytes += len(placement.lengths) + 9 * placement.rows
        if len(piece) == PIECE or nbytes > PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece


_Entry = tuple[int, int, int, int, int, int, int, bytes, int, int, int]


class Referred:
    """The same while it is read: accounts and placements by their numbers."""

    def __init__(self, partition: Partition, parse: Callable[[object], Template]) -> None:
        self._partition = partition
        self._parse = parse
        self.accounts: list[Account] = []
        self.placements: list[Placement] = []

    def take_accounts(self, accounts: list[Any]) -> None:
        """The accounts of one part, after those that came before."""
        partition = self._partition
        for kind, sums, *rest in accounts:
            account: Account
            if kind == TOTAL:
                account = partition.account
            elif kind == PROMPTS:
                account = partition.prompts
            elif kind in (GROUP, OTHER_GROUP):
                account = self._group(*rest)
                if kind == GROUP:
                    partition.groups[account.uid] = account
            else:
                account = self._producer(kind, *rest)
            (
                account.rows, account.tag_bytes, account.extent_bytes, account.held_bytes,
                account.held_rows,
            ) = sums  # fmt: skip
            self.accounts.append(account)

    def _producer(self, kind: int, parent: int, client_id: str) -> Producer:
        producer = Producer(client_id, self.accounts[parent])
        if kind == PRODUCER:
            self._partition.producers[client_id] = producer
        elif kind == PROMPTER:
            self._partition.prompters[client_id] = producer
        return producer

    def _group(
        self,
        producer: int,
        uid: str,
        attempt: int,
        n: int,
        declared_bytes: int,
        store: str,
        kept_bytes: int,
        status: str,
        since: int,
        at: float,
        is_open: bool,
    ) -> Group:
        parent = self.accounts[producer]
        if type(parent) is not Producer:
            raise ValueError(f"group {uid!r} has no producer")
        # Made with nothing reserved: what it and its parents hold is in their sums already.
        group = Group(uid, self._partition.partition_id, attempt, 0, 0, parent, at=at)
        group.n = n
        group.declared_bytes = declared_bytes
        group.store = store
        group.kept_bytes = kept_bytes
        group.status = status
        group.since = since
        group.open = is_open
        return group

    def take_placements(self, names: list[str], blobs: list[bytes], *columns: Any) -> None:
        """The placements of one part, after those that came before."""
        *each, shares, starts, positions = columns
        templates = list(map(self._parse, blobs))
        partition_id, accounts = self._partition.partition_id, self.accounts
        made: list[Placement] = []
        entries = cast("Iterator[_Entry]", zip(*each, starts, strict=True))
        for (
            store, block, segment, offset, nbytes, template, rows, lengths, live, charged, start,
        ) in entries:  # fmt: skip
            placement = Placement(
                names[store], block, segment, offset, nbytes, templates[template], rows, lengths
            )
            placement.live = live
            placement.partition_id = partition_id
            if charged >= 0:
                placement.charged = accounts[charged]
            if start >= 0:
                placement.positions = range(start, start + rows)
            made.append(placement)
        for i, parts in shares:
            made[i].charged = {accounts[account]: nbytes for account, nbytes in parts}
        for i, listed in positions:
            made[i].positions = listed
        self.placements += made
