"""A trace from what the tag store remembers: requests in order, folded into rows. Pure.

Tags at a request are those of all requests before it, merged in order as the store merges them. A
clear by predicate names no key: whom it removed follows from their tags at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dataplane.lineage.checks import Checks
from dataplane.lineage.life import Cell, Life, shaped
from dataplane.lineage.rows import KEY, PLANE, TAGS, Trace, TraceRow
from dataplane.lineage.stages import stage_of_field, stage_of_op, stage_of_tags
from dataplane.tags.query import compile_where

Entry = Mapping[str, Any]


def assemble(
    answer: Mapping[str, Any],
    partition_id: str | None,
    uid: str | None,
    key: str | None,
    *,
    since: int = 0,
) -> Trace:
    """The trace that an answer of the tag store makes; rows before the request `since` are left
    out."""
    making = _Making(answer, uid)
    for entry in answer["entries"]:
        making.take(entry)
    checks = making.checks
    findings = checks.findings(complete=making.complete)
    rows = [row for row in making.rows if row.number >= since]
    prompt = making.prompt
    sessions = {
        life.number("session_id")
        for life in making.lives.values()
        if life.gen and not life.is_padding and life.number("session_id") is not None
    } | making.sessions  # fmt: skip
    return Trace(
        partition_id=partition_id or making.partition,
        uid=uid,
        key=key,
        rows=rows,
        findings=[] if uid is None else findings,
        never_read=making.never_read(),
        read_by_several=making.read_by_several(),
        open_keys=sorted(checks.left_over()),
        present=[each[1] for each in answer["present"]],
        status=prompt,
        sessions=(len(sessions), making.due),
        gone=answer["gone"],
        partial=answer["partial"],
        next=answer["next"],
        detail=answer["detail"],
    )


class _Making:
    """A trace under way."""

    def __init__(self, answer: Mapping[str, Any], uid: str | None) -> None:
        self.rows: list[TraceRow] = []
        self.lives: dict[tuple[str, str], Life] = {}
        self.checks = Checks(self.lives, uid)
        self.prompt: str | None = None
        """The last status of the prompt."""
        self.due: int | None = None
        """Sessions that the group is to have."""
        self.sessions: set[int | None] = set()
        self.partition: str | None = None
        self._uid = uid
        self.complete = not answer["gone"] and not answer["partial"]
        self._today = {(each[0], each[1]): each for each in answer["present"]}
        self._called = {
            client_id: called(client_id, label)
            for client_id, (label, _) in answer["clients"].items()
        }
        self._attempts: dict[int, tuple[str, str]] = {}
        self._written: dict[str, set[tuple[str, str]]] = {}
        """Keys for which each field was written, and which nobody has read."""
        self._readers: dict[str, int] = {}
        self._take: dict[str, Callable[[Entry], None]] = {
            "put": self._put, "tag": self._put, "get": self._get, "clear": self._clear,
            "begin": self._begin, "end": self._end, "claim": self._claim,
            "commit": self._claimed, "release": self._claimed, "refuse": self._refuse,
            "drop": self._drop, "lost": self._lost, "note": self._note, "start": self._plane,
            "load": self._plane,
        }  # fmt: skip

    def take(self, entry: Entry) -> None:
        """One request."""
        self._take[entry["op"]](entry)

    def never_read(self) -> list[str]:
        """Fields that nobody has read of any key."""
        return sorted(name for name, keys in self._written.items() if keys)

    def read_by_several(self) -> dict[str, int]:
        """How many clients have read a field of one key, at most, where it is more than one."""
        return {name: count for name, count in sorted(self._readers.items()) if count > 1}

    # -- steps -------------------------------------------------------------------------------

    def _life(self, partition: str, key: str) -> Life:
        life = self.lives.get((partition, key))
        if life is None:
            today = self._today.get((partition, key))
            life = Life(partition, key, {} if today is None else today[3])
            self.lives[partition, key] = life
        return life

    def _row(self, entry: Entry, life: Life, field: str, stage: str) -> TraceRow:
        """A row more, with what every row has."""
        self.partition = self.partition or life.partition
        row = TraceRow(
            number=entry["number"], n=entry["n"], ts=entry["at"], stage=stage, op=entry["op"],
            field=field, client=entry["client"],
        )  # fmt: skip
        self.rows.append(life.fill(row))
        return row

    def _who(self, entry: Entry) -> str:
        client_id: str = entry["client"]
        return self._called.get(client_id) or called(client_id, "")

    # -- what changes rows -------------------------------------------------------------------

    def _put(self, entry: Entry) -> None:
        names = [column[0] for column in entry["columns"]]
        for key, tags, shapes in entry["rows"]:
            life = self._life(entry["partition"], key)
            first = len(self.rows)
            self._be(life)
            life.changed = entry["n"]
            if entry["attempt"] is not None:
                life.attempt = entry["attempt"]
            if tags:
                self._merge(entry, life, tags, names)
            for (name, dtype, ragged, _), shape in zip(entry["columns"], shapes, strict=True):
                stage = stage_of_field(entry["stage"], name, names, padding=life.is_padding)
                row = shaped(self._row(entry, life, name, stage), dtype, ragged, shape)
                row.producer = self._who(entry)
                self._overwrite(life, name, Cell(row, (entry["store"], entry["block"])))
            if len(self.rows) == first:
                self._row(entry, life, KEY, entry["stage"])
            if life.made is None or life.made.gen != life.gen:
                life.made = self.rows[first]
            self.checks.changed(life, self.rows[first])

    def _be(self, life: Life) -> None:
        if not life.exists:
            life.exists = True
            life.gen += 1

    def _merge(
        self, entry: Entry, life: Life, tags: Mapping[str, Any], names: Collection[str] = ()
    ) -> None:
        """Merge tags that came with these fields."""
        before = dict(life.tags)
        life.tags.update(tags)
        if names:
            first = next(iter(names))
            stage = stage_of_field(entry["stage"], first, names, padding=life.is_padding)
        else:
            stage = stage_of_tags(entry["stage"], tags, life.tags)
        row = self._row(entry, life, TAGS, stage)
        row.producer = self._who(entry)
        row.tags = dict(tags)
        self.checks.tagged(life, before, row)
        life.wrote.update(dict.fromkeys(tags, row))
        self._note_prompt(life)
        if life.number("session_id") is not None and not life.is_padding:
            self.sessions.add(life.number("session_id"))

    def _note_prompt(self, life: Life) -> None:
        if life.is_prompt and life.key == self._uid:
            status = life.tags.get("status")
            if isinstance(status, str):
                self.prompt = status
            if life.number("n") is not None:
                self.due = life.number("n")

    def _overwrite(self, life: Life, name: str, cell: Cell) -> None:
        life.cells[name] = cell
        if not life.is_padding:
            self._written.setdefault(name, set()).add((life.partition, life.key))

    def _begin(self, entry: Entry) -> None:
        partition, uid = entry["partition"], entry["uid"]
        older = {n for n, of in self._attempts.items() if of == (partition, uid)}
        self._attempts[entry["attempt"]] = (partition, uid)
        for life in self.lives.values():
            if life.partition == partition and life.exists and life.attempt in older:
                self._remove(entry, life, f"gen {life.gen} dropped: group begun anew")
        life = self._life(partition, uid)
        self.checks.begun(life)
        self._be(life)
        life.changed = entry["n"]
        tags = {
            "is_prompt": True, "status": "running", "uid": uid, "n": entry["sessions"],
            "attempt": entry["attempt"],
        }  # fmt: skip
        self._merge(entry, life, tags)

    def _end(self, entry: Entry) -> None:
        partition, uid = self._attempts.get(entry["attempt"], (entry.get("partition"), ""))
        uid = uid or entry.get("uid")
        if partition is None or not uid:
            return
        life = self._life(partition, uid)
        if life.exists or not life.gen:  # else its row was cleared, and is not written anew
            self._be(life)
            life.changed = entry["n"]
            self._merge(entry, life, {"status": entry["status"]})
        else:
            row = self._row(entry, life, KEY, stage_of_op(entry["stage"], "end"))
            row.detail = f"status {entry['status']}"
        self.checks.ended(life, self.rows[-1])
        if uid == self._uid:
            self.prompt = entry["status"]

    def _clear(self, entry: Entry) -> None:
        partition = entry["partition"]
        if "keys" in entry:
            lives: Iterable[Life] = [self._life(partition, key) for key in entry["keys"]]
        else:
            matches = compile_where(entry["where"])
            until = entry["until"]
            lives = [
                life
                for life in self.lives.values()
                if life.partition == partition
                and life.exists
                and matches(life.tags)
                and (until is None or life.changed <= until)
            ]
        gone: list[TraceRow] = []
        for life in lives:
            if life.exists or (not life.gen and not self.complete):
                gone.append(self._remove(entry, life, f"gen {life.gen} closed"))
        if gone:
            self.checks.cleared(gone)

    def _remove(self, entry: Entry, life: Life, detail: str) -> TraceRow:
        row = self._row(entry, life, KEY, stage_of_op(entry["stage"], "clear"))
        row.op = "clear"
        row.consumer = ""
        row.producer = self._who(entry)
        row.detail = detail
        life.end(row)
        return row

    def _drop(self, entry: Entry) -> None:
        for life in self.lives.values():
            if life.partition in entry["partitions"] and life.exists:
                row = self._remove(entry, life, "partition dropped")
                row.op = "drop"

    def _lost(self, entry: Entry) -> None:
        blocks = None if entry["blocks"] is None else set(entry["blocks"])
        for life in self.lives.values():
            for name, cell in list(life.cells.items()):
                store, block = cell.place
                if store == entry["store"] and (blocks is None or block in blocks):
                    row = self._row(entry, life, name, "")
                    row.detail = f"with value store {store}"
                    del life.cells[name]

    # -- what reads them ---------------------------------------------------------------------

    def _get(self, entry: Entry) -> None:
        who = self._who(entry)
        for key in entry["keys"]:
            life = self._life(entry["partition"], key)
            for name in entry["fields"]:
                row = self._row(entry, life, name, entry["stage"])
                row.consumer = who
                cell = life.cells.get(name)
                if cell is None:
                    continue  # written before what is remembered
                of = cell.row
                row.shape, row.layout, row.dtype = of.shape, of.layout, of.dtype
                row.len, row.valid_len, row.bytes = of.len, of.valid_len, of.bytes
                row.producer = of.producer
                cell.readers[entry["client"]] = who
                of.consumer = ",".join(dict.fromkeys(cell.readers.values()))
                self._written.get(name, set()).discard((life.partition, key))
                self._readers[name] = max(self._readers.get(name, 0), len(cell.readers))
                if self.checks.hashed:
                    life.readings.append((cell, row))
            self.checks.read(life, entry["stage"], self.rows[-1] if entry["fields"] else None)

    def _claim(self, entry: Entry) -> None:
        for key, claim_id, rank in entry["rows"]:
            row = self._row(
                entry, self._life(entry["partition"], key), KEY,
                stage_of_op(entry["stage"], "claim"),
            )  # fmt: skip
            row.consumer = self._who(entry)
            row.detail = f"claim {claim_id} of task {entry['task']}"
            if rank is not None:
                row.detail += f", rank {rank}"

    def _claimed(self, entry: Entry) -> None:
        for key in entry["keys"]:
            life = self._life(entry["partition"], key)
            row = self._row(entry, life, KEY, stage_of_op(entry["stage"], entry["op"]))
            row.consumer = self._who(entry) if entry["client"] else ""
            row.detail = f"claim {entry['claim']} of task {entry['task']}"
            if entry.get("why"):
                row.detail += f": {entry['why']}"

    def _refuse(self, entry: Entry) -> None:
        for key in entry["keys"] or [""]:
            life = self._life(entry["partition"], key)
            row = self._row(entry, life, KEY, entry["stage"])
            row.status = entry["error"]
            if entry["verb"] in ("put", "begin_group", "end_group"):
                row.producer = self._who(entry)
            else:
                row.consumer = self._who(entry)
            row.detail = f"{entry['verb']}: {entry['message']}"

    # -- the rest ----------------------------------------------------------------------------

    def _note(self, entry: Entry) -> None:
        self.checks.hashed = True
        for key, hashes, previews in entry["rows"]:
            life = self._life(entry["partition"], key)
            for i, name in enumerate(entry["fields"]):
                digest = hashes[i].hex()
                shown = previews[i] if previews else ""
                if entry["verb"] == "put":
                    self._note_put(life, name, entry["of_n"], digest, shown)
                else:
                    self._note_get(life, name, entry["client"], digest, shown)

    def _note_put(self, life: Life, name: str, n: int, digest: str, shown: str) -> None:
        cell = life.cells.get(name)
        if cell is not None and cell.row.n == n:
            cell.hash = cell.row.hash = digest
            cell.row.preview = shown

    def _note_get(self, life: Life, name: str, client: str, digest: str, shown: str) -> None:
        for at, (cell, row) in enumerate(life.readings):
            if row.field == name and row.client == client:
                row.hash, row.preview = digest, shown
                del life.readings[at]
                self.checks.compared(life, cell, row)
                return

    def _plane(self, entry: Entry) -> None:
        row = TraceRow(
            number=entry["number"], n=entry["n"], ts=entry["at"], stage="", op=entry["op"],
            field=PLANE,
        )  # fmt: skip
        if entry["op"] == "start":
            row.detail = f"the tag store was started again: epoch {entry['epoch']}"
        else:
            row.detail = "a checkpoint was loaded"
        self.rows.append(row)


def called(client_id: str, label: str) -> str:
    """What a client is called in a table: the name that it gave itself, else where it runs."""
    name, _, place = label.partition(" (pid ")
    if place:
        return name
    pid, _, host = label.removeprefix("pid ").partition(" on ")
    if host and pid.isdigit():
        return f"{host}:{pid}"
    return label or client_id[:8]
