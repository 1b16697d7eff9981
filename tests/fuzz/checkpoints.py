"""What the files of a checkpoint may say: the manifest, tags in Parquet, values in Arrow, and all.

Seeds are files of real saves. Their checksums are no obstacle: who damages a file can compute one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.checkpoint import tables, values
from dataplane.checkpoint.files import OpenedFile
from dataplane.checkpoint.heads import MessageHead, parquet_rows
from dataplane.checkpoint.load import Checkpoint
from dataplane.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FieldEntry,
    FileEntry,
    GroupEntry,
    Malformed,
    Manifest,
    PartitionEntry,
    checksum_line,
    parse,
)
from dataplane.checkpoint.save import Piece, Saving, SavingPartition
from dataplane.checkpoint.verify import check
from dataplane.codec import objects
from dataplane.errors import CheckpointDamaged, InvalidRequest
from dataplane.tags.history import History
from dataplane.tags.keys import unpack_tags
from dataplane.tags.restoring import Restoring, SavedGroup, SavedRows
from dataplane.tags.store import TagStore
from dataplane.types import Quota, Retention
from tests.fuzz import trees
from tests.fuzz.target import KiB, MiB, Target

_DAMAGE = (CheckpointDamaged, InvalidRequest)
TAGS, VALUES = "0-tags.parquet", "0-values-0.arrow"
BLOCK_BYTES = 4 * KiB

# -- a real checkpoint -------------------------------------------------------------------------

_COLUMNS = [
    values.ValueColumn("x", "int32", 1, 0),
    values.ValueColumn("m", "bfloat16", 2, 1),
    values.ValueColumn("s", "complex128", 0, None),
    values.ValueColumn("o", "object", 1, 0),
]


def _piece(count: int) -> Piece:
    tags = [
        {"i": i, "f": i / 3, "s": f"t{i}", "b": i % 2 == 0, "mixed": i if i % 2 else [None, "$x"]}
        for i in range(count)
    ]
    return Piece(
        [f"k{i}" for i in range(count)],
        b"".join(map(msgpack.packb, tags)),
        np.arange(1, count + 1).tobytes(),
        bytes(8 * count),
        np.array([7 if i % 2 else -1 for i in range(count)], np.int64).tobytes(),
        ["c", "d"],
        np.array([i % 2 for i in range(count)], np.int32).tobytes(),
        {"t": np.array([i % 3 - 1 for i in range(count)], np.int32).tobytes()},
    )


def _cells(count: int) -> list[values.Cells]:
    rows = np.arange(count)
    every_other = rows[::2]
    one = np.arange(count, dtype=np.int32)[:, None]
    two = np.array([[2, i % 3] for i in every_other.tolist()], np.int32).reshape(-1, 2)
    packed = [objects.pack({"n": int(i), "t": (1, "a")}) for i in rows]
    return [
        values.Cells(
            _COLUMNS[0], rows, one, np.arange(int(one.sum()), dtype=np.int32).view(np.uint8)
        ),
        values.Cells(
            _COLUMNS[1], every_other, two, np.zeros(2 * int(two.prod(axis=1).sum()), np.uint8)
        ),
        values.Cells(
            _COLUMNS[2], rows, np.zeros((count, 0), np.int32), np.zeros(16 * count, np.uint8)
        ),
        values.Cells(
            _COLUMNS[3], rows, np.array([[len(part)] for part in packed], np.int32),
            np.frombuffer(b"".join(packed), np.uint8),
        ),
    ]  # fmt: skip


def _manifest(tags: FileEntry, of_values: list[FileEntry]) -> Manifest:
    fields = {
        of.name: FieldEntry(dtype=of.dtype, rank=of.rank, ragged_dim=of.ragged_dim)
        for of in _COLUMNS
    }
    group = GroupEntry(
        uid="u", attempt=7, n=2, declared_bytes=10, status="running", since=7, at=1.0, open=True,
        producer="c",
    )  # fmt: skip
    task = {
        "task": "t", "last_id": 3, "forgotten": -1, "closed": [[1, 5, {"k0": "cleared"}, True]],
        "leases": [{
            "claim_id": 2, "revision": 4, "rows": [["k1", 1]], "held": ["k1"], "lost": {},
            "done": [], "holders": {"c": [5]}, "lease_s": 30.0, "grouped": False, "at": 1.0,
            "share": None,
        }],
        "batches": [{
            "index": 0, "terms": [1, 2, ["x"], "80", None, False],
            "shares": [{"claim_id": 3, "revision": 4, "rows": [["k4", 2]], "asked": True}],
        }],
    }  # fmt: skip
    entry = PartitionEntry(
        partition_id="p", rows=tags.rows, revision=90, sealed=False, open_schema=False,
        fields=fields, quota={"rows": 100}, retention={"versions": 2}, groups=[group],
        tasks=[task], tags=tags, values=of_values,
    )  # fmt: skip
    return Manifest(
        plane_name="plane", plane_id="0" * 16, epoch=1, n=100, floor=0, saved_at=0.0,
        partitions=[entry],
    )  # fmt: skip


@functools.cache
def saved(count: int) -> dict[str, bytes]:
    """The files of a checkpoint of one partition."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        saving = Saving(folder / "saved", overwrite=False)
        files = SavingPartition(saving, 0, _COLUMNS)
        try:
            for _ in range(1 if count else 0):
                files.add(_piece(count))
                files.add_values(_cells(count), count)
            tags, of_values = files.finish()
        finally:
            files.close()
        saving.commit(_manifest(tags, of_values))
        saving.abandon()
        return {path.name: path.read_bytes() for path in sorted((folder / "saved").iterdir())}
    finally:
        shutil.rmtree(folder)


# -- the manifest ------------------------------------------------------------------------------


def _json(data: bytes) -> Any:
    return json.loads(data)


def _text(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def _plain(value: Any) -> Any:
    """The value as JSON can say it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, msgpack.ExtType | msgpack.Timestamp):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _parse(data: bytes) -> None:
    manifest = parse(data)
    again = parse(manifest.to_bytes())
    assert again.to_bytes() == manifest.to_bytes()  # NaN is not equal to itself
    restoring = Restoring(manifest.epoch, manifest.n)
    for partition in manifest.partitions:
        restoring.begin(
            partition.partition_id, partition.schema_of, open_schema=partition.open_schema
        )
        groups = [SavedGroup.checked(tuple(dict(group).values())) for group in partition.groups]
        restoring.add_groups(partition.partition_id, groups)
        restoring.settle(
            partition.partition_id, sealed=partition.sealed, quota=Quota.of(partition.quota),
            retention=Retention.of(partition.retention), tasks=partition.tasks,
        )  # fmt: skip
    restoring.finish(TagStore(1, History()), History())


def _manifest_seeds() -> Iterator[bytes]:
    for count in (0, 5):
        yield saved(count)[MANIFEST]
    yield b"[" * 5000
    yield b'{"format": "dataplane-checkpoint", "version": 99}'
    yield b'{"format": "dataplane-checkpoint", "version": 1, "n": ' + b"9" * 5000 + b"}"
    yield b'{"partitions": [' + b'{"rows": 1},' * 100 + b"{}]}"


# -- rows that are loaded ----------------------------------------------------------------------


def _rows(data: bytes) -> None:
    """What a client sends of a checkpoint's rows, as a load takes it, into a partition with the
    groups of the manifest."""
    match trees.value_in(data):
        case [list(parts), dict(task), int(first)] if len(parts) == 6:
            keys, tags, numbers, producers, codes, tasks = parts
        case _:
            return
    manifest = parse(saved(5)[MANIFEST])
    of = manifest.partitions[0]
    restoring = Restoring(manifest.epoch, manifest.n)
    restoring.begin("p", of.schema_of, open_schema=False)
    restoring.add_groups("p", [SavedGroup.checked(tuple(dict(of.groups[0]).values()))])
    if type(tags) is not bytes or type(numbers) is not list or len(numbers) != 3:
        return
    if type(producers) is not list or type(codes) is not bytes:
        return  # a verb that is given other types than these refuses it (server/restoring.py)
    try:
        rows = SavedRows.unpacked(keys, tags, numbers, producers, codes, tasks)
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidRequest(str(error)) from None  # as the connection does with a verb's
    restoring.add_rows("p", first, rows)
    restoring.settle("p", sealed=False, quota=None, retention=None, tasks=[task])
    store = TagStore(1, History())
    restoring.finish(store, History())
    assert len(store.partitions["p"]) == len(rows.keys)


def _rows_seeds() -> Iterator[bytes]:
    task = parse(saved(5)[MANIFEST]).partitions[0].tasks[0]
    for count in (0, 1, 5):
        piece = _piece(count)
        numbers = [piece.revisions, piece.cleared_at, piece.attempts]
        parts = [piece.keys, piece.tags, numbers, piece.producers, piece.codes, piece.tasks]
        yield msgpack.packb([parts, task, 0])


# -- files of rows -----------------------------------------------------------------------------


def _opened(name: str, rows: int, data: bytes) -> tuple[OpenedFile, str]:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    (Path(folder) / name).write_bytes(data)
    entry = FileEntry(
        name=name, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest(), rows=rows
    )
    at = os.open(folder, os.O_RDONLY)
    try:
        return OpenedFile(folder, at, entry), folder
    finally:
        os.close(at)


def _read(name: str, data: bytes) -> None:
    """A file as the loader reads it; the manifest says as many rows as its first two bytes do."""
    if len(data) < 2:
        return
    file, folder = _opened(name, int.from_bytes(data[:2], "little"), data[2:])
    try:
        if name == TAGS:
            for rows in file.tags():
                packed = b"".join(map(msgpack.packb, rows.tags))
                assert len(rows.keys) == len(rows.tags) == len(rows.producers)
                try:
                    unpack_tags(packed, rows.keys, saved=True)
                except InvalidRequest:
                    pass  # a load says so when the rows come to the tag store
        else:
            for cells, count in file.batches():
                for block in values.blocks(cells, count, BLOCK_BYTES):
                    total = block.template.block_bytes(block.lengths, len(block.rows))
                    assert total == block.nbytes == sum(map(len, block.pieces))
    except Malformed as error:
        raise file.damaged(str(error)) from None  # as client/loading.py does with a batch
    finally:
        file.close()
        shutil.rmtree(folder)


def _file_seeds(name: str) -> Iterator[bytes]:
    for count in (0, 5, 40):
        files = saved(count)
        if name in files:
            yield count.to_bytes(2, "little") + files[name]


def _tags_seeds() -> Iterator[bytes]:
    yield from _file_seeds(TAGS)
    content = saved(5)[TAGS]
    table = pq.read_table(pa.BufferReader(content))
    for options in (
        {}, {"compression": "snappy"}, {"use_dictionary": True}, {"data_page_version": "2.0"},
        {"column_encoding": {"revision": "DELTA_BINARY_PACKED"}},
    ):  # fmt: skip
        plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **{**plain, **options})
        yield (5).to_bytes(2, "little") + sink.getvalue().to_pybytes()
    end = len(content)
    for footer in (0, 1, 1 << 31, (1 << 32) - 1):
        yield (
            (5).to_bytes(2, "little") + content[: end - 8] + footer.to_bytes(4, "little") + b"PAR1"
        )


def _values_seeds() -> Iterator[bytes]:
    yield from _file_seeds(VALUES)
    content = saved(5)[VALUES]
    for size in (1 << 31, (1 << 32) - 8):
        changed = bytearray(content)
        changed[12:16] = size.to_bytes(4, "little")
        yield (5).to_bytes(2, "little") + bytes(changed)
    schema = pa.schema([pa.field("x", pa.int8())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_batch(pa.record_batch([pa.array(np.zeros(1 << 16, np.int8))], schema=schema))
    yield b"\0\0" + sink.getvalue().to_pybytes()


_INTERESTING = [0, 1, -1, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, -(1 << 63)]


def _words(data: bytes, chance: random.Random) -> bytes:
    """Changes of whole words at even places, as lengths and offsets lie in Arrow's files."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        width = chance.choice((1, 2, 4, 4, 8))
        if len(out) < 2 + width:
            break
        at = 2 + chance.randrange((len(out) - 2) // width) * width
        now = int.from_bytes(out[at : at + width], "little")
        number = chance.choice((now + 1, now - 1, now * 2, now + 8, chance.choice(_INTERESTING)))
        out[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(out) if chance.random() < 0.8 else trees.flipped(data, chance)


def _file_plant(data: bytes, payload: bytes) -> Iterator[bytes]:
    """A pickle in the place of the bytes of a file, from every so many on."""
    for at in range(2, len(data), max(16, len(data) // 50)):
        yield data[:at] + payload + data[at + len(payload) :]


# -- heads -------------------------------------------------------------------------------------


def _arrow_head(data: bytes) -> None:
    head = MessageHead(data)
    assert (head.kind, head.body_bytes, head.is_compressed) is not None


def _arrow_head_seeds() -> Iterator[bytes]:
    content = saved(5)[VALUES]
    at = 8
    while True:
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if not size:
            return
        head = content[at + 8 : at + 8 + size]
        yield head
        at += 8 + size + MessageHead(head).body_bytes


def _parquet_head(data: bytes) -> None:
    def read(at: int, nbytes: int) -> bytes:
        if at < 0 or not 0 <= nbytes <= len(data) - at:
            raise Malformed("outside of the file")
        return data[at : at + nbytes]

    counts = parquet_rows(read, len(data))
    assert all(count >= 0 for count in counts)


def _parquet_head_seeds() -> Iterator[bytes]:
    for seed in _tags_seeds():
        yield seed[2:]
    for count in (100, 1 << 20):
        # A footer that is one list of so many structs without an end.
        footer = b"\x49\xfc" + _varint(count) + b"\0" * 100
        yield b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    footer = b"\x1c" * 3000
    yield b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _tag_json(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    value = tables.from_json(text)
    again = tables.from_json(tables.to_json(value))
    assert repr(again) == repr(value)


def _tag_json_seeds() -> Iterator[bytes]:
    for value in (
        None, 1, -0.0, float("nan"), float("inf"), "$", "text", [1, {"a": None}], {"$float": "x"},
        {"$$": [float("-inf")]}, (1 << 64) - 1, "\ud7ff\0",
    ):  # fmt: skip
        yield tables.to_json(value).encode()
    yield b"[" * 4000
    yield b'{"$float": "7ff8000000000000"}'
    yield b'{"$float": "7f f8"}'
    yield b'{"$a": 1}'
    yield b"NaN"
    yield b"9" * 4000


# -- a whole checkpoint ------------------------------------------------------------------------


def _checkpoint(data: bytes) -> None:
    """A checkpoint whose files are all as the manifest says, which is as it comes."""
    match trees.value_in(data):
        case [bytes(manifest), bytes(tags), bytes(of_values)]:
            pass
        case _:
            return
    folder = tempfile.mkdtemp(prefix="fuzz-")
    try:
        files = {MANIFEST: manifest, TAGS: tags, VALUES: of_values}
        files[CHECKSUM] = checksum_line(manifest)
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        with Checkpoint(folder) as checkpoint:
            for _ in check(checkpoint):
                pass
    finally:
        shutil.rmtree(folder)


def _believed(data: bytes) -> bytes:
    """The checkpoint with the sizes and checksums in its manifest that its files have."""
    manifest, tags, of_values = trees.unpacked(data)
    try:
        about = json.loads(manifest)
        partition = about["partitions"][0]
        for entry, content in ((partition["tags"], tags), (partition["values"][0], of_values)):
            entry["nbytes"] = len(content)
            entry["sha256"] = hashlib.sha256(content).hexdigest()
        manifest = json.dumps(about).encode()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    return trees.packed([manifest, tags, of_values])


def _checkpoint_mutate(data: bytes, chance: random.Random) -> bytes:
    try:
        manifest, tags, of_values = trees.unpacked(data)
        match chance.randrange(4):
            case 0:
                tags = _words(b"\0\0" + tags, chance)[2:]
            case 1:
                of_values = _words(b"\0\0" + of_values, chance)[2:]
            case _:
                manifest = trees.by_trees(_json, _text)(manifest, chance)
        changed = trees.packed([manifest, tags, of_values])
        return _believed(changed) if chance.random() < 0.8 else changed
    except (ValueError, TypeError):
        return trees.flipped(data, chance)


def _checkpoint_plant(data: bytes, payload: bytes) -> Iterator[bytes]:
    manifest, tags, of_values = trees.unpacked(data)
    for planted in trees.planted(_json, _text)(manifest, payload):
        yield _believed(trees.packed([planted, tags, of_values]))
    yield _believed(trees.packed([manifest, payload, of_values]))
    yield _believed(trees.packed([manifest, tags, payload]))
    for planted in _file_plant(b"\0\0" + of_values, payload):
        yield _believed(trees.packed([manifest, tags, planted[2:]]))


def _checkpoint_seeds() -> Iterator[bytes]:
    files = saved(5)
    yield trees.packed([files[MANIFEST], files[TAGS], files[VALUES]])


TARGETS = [
    Target(
        "checkpoint-manifest", _parse, _manifest_seeds, (Malformed, InvalidRequest),
        mutate=trees.by_trees(_json, _text), plant=trees.planted(_json, _text), max_len=8 * KiB,
    ),
    Target(
        "checkpoint-rows", _rows, _rows_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(), max_len=8 * KiB,
    ),
    Target(
        "checkpoint-tags", lambda data: _read(TAGS, data), _tags_seeds, (CheckpointDamaged,),
        mutate=_words, plant=_file_plant, limit_bytes=16 * MiB, max_len=32 * KiB,
    ),
    Target(
        "checkpoint-values", lambda data: _read(VALUES, data), _values_seeds, (CheckpointDamaged,),
        mutate=_words, plant=_file_plant, limit_bytes=16 * MiB, max_len=32 * KiB,
    ),
    Target("arrow-head", _arrow_head, _arrow_head_seeds, (Malformed,), max_len=8 * KiB),
    Target("parquet-head", _parquet_head, _parquet_head_seeds, (Malformed,), max_len=16 * KiB),
    Target("tag-json", _tag_json, _tag_json_seeds, (Malformed,)),
    Target(
        "checkpoint", _checkpoint, _checkpoint_seeds, _DAMAGE, mutate=_checkpoint_mutate,
        plant=_checkpoint_plant, limit_bytes=16 * MiB, max_len=64 * KiB,
    ),
]  # fmt: skip
