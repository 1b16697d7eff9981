"""What a disk may say at a start: a journal, a snapshot, and the folder that they make together.

Seeds are journals of random histories of the real service, cut in pieces that the fuzzer can hold.
Checksums are made right again after every change, so that what lies behind them is reached.
"""

from __future__ import annotations

import functools
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack

from dataplane.errors import InvalidRequest, JournalDamaged
from dataplane.tags.history import History
from dataplane.tags.journal_folder import open_journal
from dataplane.tags.journal_verify import verify_journal
from dataplane.tags.records import FRAME, MAGIC, VERSION, Head, Records, framed, head_bytes
from dataplane.tags.replay.replay import Replay, replay
from dataplane.tags.snapshot import format as form
from dataplane.tags.snapshot.format import Parts, written
from dataplane.tags.snapshot.state import head_of, loaded, parts_of
from tests.dataplane.histories import Histories
from tests.dataplane.replaying import Live
from tests.fuzz import trees
from tests.fuzz.target import KiB, MiB, Target
from tests.fuzz.wire import run

PLANE = "plane"
FRONT_BYTES = len(MAGIC) + 1
_LAST = 99_999_999
"""The highest number that a file's name can have."""
_DAMAGE = (JournalDamaged, InvalidRequest)

# -- files of frames ---------------------------------------------------------------------------


def split(data: bytes) -> list[Any]:
    """The front of a file and what is packed in each of its frames; a rest that is none as bytes
    within a list."""
    parts: list[Any] = [data[:FRONT_BYTES]]
    at = FRONT_BYTES
    while len(data) - at >= FRAME.size:
        nbytes, _ = FRAME.unpack_from(data, at)
        packed = data[at + FRAME.size : at + FRAME.size + nbytes]
        if len(packed) < nbytes:
            break
        try:
            parts.append(trees.unpacked(packed))
        except (ValueError, TypeError, RecursionError):
            break
        at += FRAME.size + nbytes
    if at < len(data):
        parts.append([data[at:]])
    return parts


def joined(parts: list[Any]) -> bytes:
    """A file of such parts, every frame of it with the right checksum."""
    front, *rest = parts
    if type(front) is not bytes:
        raise TypeError("a file begins with bytes")
    out = front
    for part in rest:
        if type(part) is list and len(part) == 1 and type(part[0]) is bytes:
            out += part[0]
        else:
            out += framed(trees.packed(part))
    return out


def mended(data: bytes) -> bytes:
    """The file with right checksums wherever a frame begins, and none that is longer than it."""
    out = bytearray(data)
    at = FRONT_BYTES
    while len(out) - at > FRAME.size:
        nbytes, _ = FRAME.unpack_from(out, at)
        nbytes = min(nbytes, len(out) - at - FRAME.size)
        packed = bytes(out[at + FRAME.size : at + FRAME.size + nbytes])
        FRAME.pack_into(out, at, nbytes, zlib.crc32(packed))
        at += FRAME.size + nbytes
    return bytes(out)


def _mutate(data: bytes, chance: random.Random) -> bytes:
    how = chance.random()
    if how < 0.1:
        return trees.flipped(data, chance)
    if how < 0.25:
        return mended(trees.flipped(data, chance))
    try:
        parts = split(data)
        at = chance.randrange(len(parts))
        if how < 0.35:
            parts.insert(at, parts.pop())
        elif how < 0.45:
            del parts[at]
        elif how < 0.5:
            parts.insert(at, parts[at])
        else:
            parts[at] = trees.mutated(parts[at], chance)
            if how < 0.7:
                _renumber(parts)
        return joined(parts)
    except (ValueError, TypeError, OverflowError, IndexError, KeyError, RecursionError):
        return mended(trees.flipped(data, chance))


def _renumber(parts: list[Any]) -> None:
    """Let the records say the revisions that one after another would lead to."""
    try:
        made = Replay(1, History())
        for record in Records(BytesIO(joined(parts)), ""):
            body, at = record.body, record.at
            made._kinds[record.kind](at, *body)
            for part in parts[2:]:
                if part[3] == body:
                    part[1] = made.store.n
    except Exception:  # as far as it goes
        return


def _plant(data: bytes, payload: bytes) -> Iterator[bytes]:
    parts = split(data)
    for at in range(1, len(parts)):
        for packed in trees.planted()(trees.packed(parts[at]), payload):
            yield joined([*parts[:at], trees.unpacked(packed), *parts[at + 1 :]])


# -- seeds -------------------------------------------------------------------------------------


@functools.cache
def histories() -> tuple[tuple[bytes, bytes], ...]:
    """Journals of a few random histories, each with a snapshot of what it led to."""
    found: list[tuple[bytes, bytes]] = []
    for seed, steps in ((1, 12), (2, 25), (3, 40), (4, 60), (5, 90)):
        live = Live()

        async def play(live: Live = live, seed: int = seed, steps: int = steps) -> None:
            histories = Histories(seed, live)
            for _ in range(steps):
                await histories.step()
                await live.rest()
            for future in histories.open:
                future.cancel()
            await live.rest()

        run(play())
        made = live.follow()
        snapshot = b""
        if made.loads.restoring is None:
            snapshot = b"".join(written(head_of(made, PLANE, 1), parts_of(made)))
        found.append((live.journal.file.getvalue(), snapshot))
    return tuple(found)


_BOMBS = [
    b"\xdd\xff\xff\xff\xff" + bytes(20), b"\xdf\xff\xff\xff\xff" + bytes(20),
    b"\xc6\xff\xff\xff\xff" + bytes(20), b"\x94\x01\x01\xcb" + bytes(8) + b"\x91" * 3000,
    b"\x94\x01\x01\xcb" + bytes(8) + b"\xdd\x00\xff\xff\xff", b"\x91" * 3000,
]  # fmt: skip


def _journal_seeds() -> Iterator[bytes]:
    for journal, _ in histories():
        yield journal
        yield journal[:-5]
    front = head_bytes(Head(PLANE, 1, open_schemas=False))
    yield front
    yield head_bytes(Head(PLANE, 1, open_schemas=True))
    for bomb in _BOMBS:
        yield front + framed(bomb)
        yield MAGIC + bytes([VERSION]) + framed(bomb)
    yield front + struct.pack("<II", (1 << 32) - 1, 0) + bytes(100)
    yield front + struct.pack("<II", 256 << 20, 0) + b"\x94\x01\x01\xcb" + bytes(100)
    yield MAGIC + bytes([VERSION]) + struct.pack("<II", 1 << 31, 0) + bytes(100)
    yield front + bytes(5000)


def _snapshot_seeds() -> Iterator[bytes]:
    for _, snapshot in histories():
        if snapshot:
            yield snapshot
    made = Replay(1, History())
    empty = b"".join(written(head_of(made, PLANE, 1), parts_of(made)))
    yield empty
    front = form.MAGIC + bytes([form.VERSION])
    for bomb in _BOMBS:
        yield front + framed(bomb)
        head, *_ = split(empty)[1:]
        yield front + framed(msgpack.packb(head)) + framed(bomb)
    yield front + struct.pack("<II", (1 << 32) - 1, 0) + bytes(100)


# -- targets -----------------------------------------------------------------------------------


def _journal(data: bytes) -> None:
    records = Records(BytesIO(data), "fuzzed")
    made = replay(records, History())
    assert records.torn is None or records.torn.offset + records.torn.nbytes == len(data)
    if made.loads.restoring is None:
        # What can be replayed can be written down at once, and read back.
        snapshot = b"".join(written(head_of(made, PLANE, 1), parts_of(made)))
        loaded(Parts(BytesIO(snapshot), "fuzzed"), History())


def _snapshot(data: bytes) -> None:
    made = loaded(Parts(BytesIO(data), "fuzzed"), History())
    assert made.store.n >= 0


def _folder(data: bytes) -> None:
    """The files of a folder, each behind its name's number and length."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        at = 0
        while len(data) - at > 5:
            kind, number, size = data[at], data[at + 1], int.from_bytes(data[at + 2 : at + 5])
            number = _LAST if number == 255 else number
            name = f"{'snapshot' if kind & 1 else 'journal'}-{number:08d}{'.new' * (kind >> 7)}"
            (folder / name).write_bytes(data[at + 5 : at + 5 + size])
            at += 5 + size
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        findings: Any = None
        try:
            findings = verify_journal(folder)
        except InvalidRequest:
            assert not any(not name.endswith(".new") for name in before)
        damaged = findings is not None and any(finding.damage for finding in findings)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        try:
            opened = open_journal(
                folder, PLANE, open_schemas=False, sync="none", history=History(), now=1.0
            )
        except _DAMAGE:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            raise
        opened.journal.close()
        assert not damaged, [finding.text for finding in findings]
    finally:
        shutil.rmtree(folder)


def _folder_of(*files: tuple[int, int, bytes]) -> bytes:
    return b"".join(
        bytes([kind, number]) + len(data).to_bytes(3) + data for kind, number, data in files
    )


def _folder_seeds() -> Iterator[bytes]:
    yield b""
    for journal, snapshot in histories()[:2]:
        yield _folder_of((0, 1, journal))
        yield _folder_of((0, 1, journal[:-3]))
        second = head_bytes(Head(PLANE, 1, open_schemas=False, number=2, before=len(journal)))
        yield _folder_of((0, 1, journal), (0, 2, second))
        yield _folder_of((0, 1, journal[:-1]), (0, 2, second))
        yield _folder_of((0, 2, second))
        yield _folder_of((0, 1, journal), (0, 255, second))
        if snapshot:
            first = head_bytes(Head(PLANE, 1, open_schemas=False))
            yield _folder_of((1, 1, snapshot), (0, 1, first))
            yield _folder_of((1, 1, snapshot))
            yield _folder_of((1, 1, snapshot), (0, 1, journal), (0x80, 2, b"half"))


def _folder_files(data: bytes) -> list[Any]:
    files: list[Any] = []
    at = 0
    while len(data) - at > 5:
        size = int.from_bytes(data[at + 2 : at + 5])
        files.append([data[at : at + 2], data[at + 5 : at + 5 + size]])
        at += 5 + size
    return files


def _folder_mutate(data: bytes, chance: random.Random) -> bytes:
    files = _folder_files(data)
    if not files or chance.random() < 0.2:
        return trees.flipped(data, chance)
    at = chance.randrange(len(files))
    how = chance.random()
    if how < 0.15:
        del files[at]
    elif how < 0.3:
        name = bytes([chance.choice((0, 0, 1, 0x80)), chance.choice((0, 1, 1, 2, 2, 3, 255))])
        files[at] = [name, files[at][1]]
    elif how < 0.4:
        files.append(files[at])
    else:
        files[at] = [files[at][0], _mutate(files[at][1], chance)]
    return _folder_of(*((name[0], name[1], content) for name, content in files))


def _folder_plant(data: bytes, payload: bytes) -> Iterator[bytes]:
    files = _folder_files(data)
    for at, (name, _) in enumerate(files):
        planted = [*files[:at], [name, payload], *files[at + 1 :]]
        yield _folder_of(*((of[0], of[1], content) for of, content in planted))


TARGETS = [
    Target(
        "journal", _journal, _journal_seeds, _DAMAGE, mutate=_mutate, plant=_plant,
        limit_bytes=16 * MiB, max_len=32 * KiB,
    ),
    Target(
        "snapshot", _snapshot, _snapshot_seeds, _DAMAGE, mutate=_mutate, plant=_plant,
        limit_bytes=16 * MiB, max_len=32 * KiB,
    ),
    Target(
        "journal-folder", _folder, _folder_seeds, _DAMAGE, mutate=_folder_mutate,
        plant=_folder_plant, limit_bytes=16 * MiB, max_len=32 * KiB,
    ),
]  # fmt: skip
