"""A checkpoint's folder: whole or not there, and any damage to any file is found and named."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from dataplane.checkpoint import placing, tables, values
from dataplane.checkpoint import save as save_module
from dataplane.checkpoint.load import Checkpoint
from dataplane.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FieldEntry,
    FileEntry,
    Manifest,
    PartitionEntry,
    checksum_line,
)
from dataplane.checkpoint.placing import PARTIAL
from dataplane.checkpoint.save import Piece, Saving, SavingPartition
from dataplane.checkpoint.verify import verify_checkpoint
from dataplane.errors import CheckpointDamaged, InvalidRequest

X = values.ValueColumn("x", "int32", 1, 0)
ROWS = 20


def piece(first: int, count: int) -> Piece:
    tags = [{"i": first + i, "mixed": i if i % 2 else None} for i in range(count)]
    return Piece(
        [f"k{first + i}" for i in range(count)],
        b"".join(map(msgpack.packb, tags)),
        np.ones(count, np.int64).tobytes(),
        bytes(8 * count),
        bytes(8 * count),
        ["c"],
        bytes(4 * count),
        {"t": bytes(4 * count)},
    )


def cells(count: int) -> values.Cells:
    shapes = np.arange(count, dtype=np.int32)[:, None]
    numbers = np.arange(int(shapes.sum()), dtype=np.int32)
    return values.Cells(X, np.arange(count), shapes, numbers.view(np.uint8))


def write(saving: Saving, n: int = 100, rows: int = ROWS) -> None:
    """Write two pieces of one partition, and put the checkpoint in its place."""
    files = SavingPartition(saving, 0, [X])
    try:
        for first in range(0, rows, 10):
            files.add(piece(first, 10))
            files.add_values([cells(10)], 10)
        tags, of_values = files.finish()
    finally:
        files.close()
    saving.commit(manifest(tags, of_values, n))


def manifest(tags: FileEntry, of_values: list[FileEntry], n: int) -> Manifest:
    entry = PartitionEntry(
        partition_id="p", rows=tags.rows, revision=n, sealed=False, open_schema=False,
        fields={"x": FieldEntry(dtype="int32", rank=1, ragged_dim=0)}, quota=None,
        retention=None, groups=[], tasks=[], tags=tags, values=of_values,
    )  # fmt: skip
    return Manifest(
        plane_name="plane", plane_id="0" * 16, epoch=1, n=n, floor=0, saved_at=0.0,
        partitions=[entry],
    )  # fmt: skip


def saved(path: Path, n: int = 100, **options: Any) -> Path:
    saving = Saving(path, overwrite=options.pop("overwrite", False))
    try:
        write(saving, n, **options)
    finally:
        saving.abandon()
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "saved")


def revision_at(path: Path) -> int:
    return verify_checkpoint(path)["revision"][1]


# -- whole or not there ----------------------------------------------------------------------


def test_a_checkpoint_is_a_folder_of_these_files_and_no_others(checkpoint: Path) -> None:
    assert sorted(os.listdir(checkpoint)) == [
        "0-tags.parquet", "0-values-0.arrow", MANIFEST, CHECKSUM,
    ]  # fmt: skip
    assert os.listdir(checkpoint.parent) == ["saved"]
    summary = verify_checkpoint(checkpoint)
    assert summary["revision"] == (1, 100)
    assert summary["rows"] == ROWS
    assert summary["partitions"] == {"p": ROWS}
    assert summary["bytes"] == sum(
        (checkpoint / name).stat().st_size for name in ("0-tags.parquet", "0-values-0.arrow")
    )


def test_values_go_on_in_another_file_at_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "MAX_FILE_BYTES", 1)
    path = saved(tmp_path / "saved")
    assert sorted(p.name for p in path.glob("*.arrow")) == ["0-values-0.arrow", "0-values-1.arrow"]
    assert verify_checkpoint(path)["rows"] == ROWS
    with Checkpoint(path) as opened:
        counts = [
            [count for _, count in opened.file(entry).batches()]
            for entry in opened.manifest.partitions[0].values
        ]
    assert counts == [[10], [10]]


def test_a_partition_without_rows_has_no_values_and_is_right(tmp_path: Path) -> None:
    path = saved(tmp_path / "saved", rows=0)
    assert verify_checkpoint(path)["partitions"] == {"p": 0}
    assert list(path.glob("*.arrow")) == []


def test_a_folder_that_is_there_and_empty_is_taken(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    assert verify_checkpoint(saved(tmp_path / "saved"))["rows"] == ROWS


def test_a_checkpoint_is_not_overwritten_unasked(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        saved(checkpoint, n=7)
    assert revision_at(checkpoint) == 100


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_checkpoint_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "precious").write_text("data")
    with pytest.raises(InvalidRequest, match="no checkpoint"):
        saved(folder, overwrite=overwrite)
    (tmp_path / "file").write_text("data")
    with pytest.raises(InvalidRequest, match="no folder"):
        saved(tmp_path / "file", overwrite=overwrite)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidRequest, match="no folder"):
        saved(tmp_path / "link", overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "mine"]
    assert os.listdir(folder) == ["precious"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no folder"):
        saved(tmp_path / "none" / "saved")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_overwritten_checkpoint_is_replaced_and_nothing_is_left_of_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(placing, "_exchange", lambda one, other: False)
    (checkpoint / "stale").write_text("of the old one")
    saved(checkpoint, n=7, overwrite=True)
    assert revision_at(checkpoint) == 7
    assert not (checkpoint / "stale").exists()
    assert os.listdir(checkpoint.parent) == ["saved"]


class Crash(BaseException):
    """The process is gone: nothing of ours runs any more."""


def crashing(path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save and crash just before a step, or just after it."""
    when, _, name = step.partition(" ")
    target: Any = placing if name in ("_exchange",) else os
    real = getattr(target, name)

    def crash(*args: Any, **named: Any) -> Any:
        if when == "after":
            real(*args, **named)
        raise Crash

    saving = Saving(path, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, crash)
        with pytest.raises(Crash):
            write(saving, n=7)
    # The kernel closes what the process had open; nothing else happens.
    for fd in (saving._placing._lock, saving._placing._parent):
        os.close(fd)


@pytest.mark.parametrize(
    ("step", "revision"),
    [
        ("before fsync", 100), ("before rename", 100), ("before _exchange", 100),
        ("after _exchange", 7),
    ],
)  # fmt: skip
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(
    checkpoint: Path, step: str, revision: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing(checkpoint, step, monkeypatch)
    assert revision_at(checkpoint) == revision
    (left,) = [name for name in os.listdir(checkpoint.parent) if name != "saved"]
    assert left.startswith("saved" + PARTIAL)
    saved(checkpoint, n=8, overwrite=True)
    assert revision_at(checkpoint) == 8
    assert os.listdir(checkpoint.parent) == ["saved"]


def test_the_next_save_removes_leftovers_of_the_same_path_and_of_no_other(tmp_path: Path) -> None:
    for name in ("saved.partial-0", "saved.partial-1", "saved2.partial-0", "saved.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    saved(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == ["saved", "saved.partial", "saved2.partial-0"]


def test_a_save_that_goes_on_is_no_leftover(tmp_path: Path) -> None:
    first = Saving(tmp_path / "saved", overwrite=False)
    other = saved(tmp_path / "saved", n=7)
    assert first.folder.exists()
    with pytest.raises(InvalidRequest):
        write(first)  # it did not ask to overwrite the other, which was faster
    first.abandon()
    assert revision_at(other) == 7
    assert os.listdir(tmp_path) == ["saved"]


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "saved", overwrite=False)
    files = SavingPartition(saving, 0, [X])
    files.add(piece(0, 10))
    files.add_values([cells(10)], 10)
    files.close()
    saving.abandon()
    saving.abandon()
    assert os.listdir(tmp_path) == []


def test_saves_on_a_file_system_without_locks_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "saved.partial-0").mkdir()
    assert revision_at(saved(tmp_path / "saved")) == 100
    assert (tmp_path / "saved.partial-0").exists()  # it may be somebody's


# -- damage ----------------------------------------------------------------------------------

FILES = ["0-tags.parquet", "0-values-0.arrow", MANIFEST, CHECKSUM]


def damaged(path: Path, *names: str) -> CheckpointDamaged:
    """The error of whoever looks at it, which names one of these files."""
    with pytest.raises(CheckpointDamaged) as found:
        verify_checkpoint(path)
    error = found.value
    assert error.path == str(path)
    assert error.file in names
    assert repr(error.file) in str(error)
    return error


def about(name: str) -> tuple[str, ...]:
    """What is named when this file is damaged: of a manifest and its checksum, the manifest."""
    return (MANIFEST, CHECKSUM) if name == CHECKSUM else (name,)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_any_file_is_found(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    places = range(0, len(content), max(1, len(content) // 97))
    for i, at in enumerate([*places, len(content) - 1]):
        changed = bytearray(content)
        changed[at] ^= 1 << i % 8
        file.write_bytes(changed)
        damaged(checkpoint, *about(name))
    file.write_bytes(content)
    verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [1, 8, 100, None])
def test_a_tail_that_is_cut_off_or_too_long_is_found(
    checkpoint: Path, name: str, cut: int | None
) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.write_bytes(content[: -(cut or len(content))])
    damaged(checkpoint, *about(name))
    file.write_bytes(content + b"\0" * (cut or 1))
    damaged(checkpoint, *about(name))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_or_no_file_is_found(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.unlink()
    damaged(checkpoint, *about(name))
    os.mkfifo(file)  # to be opened only by who does not mind to wait for ever
    damaged(checkpoint, *about(name))
    file.unlink()
    other = checkpoint / "other"
    other.write_bytes(content)
    file.symlink_to(other)
    damaged(checkpoint, *about(name))


def test_two_files_that_changed_places_are_found(checkpoint: Path) -> None:
    one, two = checkpoint / FILES[0], checkpoint / FILES[1]
    one.rename(checkpoint / "aside")
    two.rename(one)
    (checkpoint / "aside").rename(two)
    damaged(checkpoint, *FILES[:2])


def test_where_there_is_no_checkpoint_that_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(InvalidRequest, match="no checkpoint at"):
            verify_checkpoint(path)
    with pytest.raises(CheckpointDamaged):
        verify_checkpoint(tmp_path)


def test_a_checkpoint_of_a_later_version_is_refused_with_both_versions(checkpoint: Path) -> None:
    change_manifest(checkpoint, lambda m: m.update(version=2))
    with pytest.raises(InvalidRequest, match=r"version 2; this release reads up to 1"):
        verify_checkpoint(checkpoint)


def test_a_reader_keeps_the_checkpoint_it_opened_while_another_takes_its_place(
    checkpoint: Path,
) -> None:
    with Checkpoint(checkpoint) as opened:
        saved(checkpoint, n=7, overwrite=True, rows=10)
        entry = opened.manifest.partitions[0].tags
        assert sum(len(rows.keys) for rows in opened.file(entry).tags()) == ROWS
    assert revision_at(checkpoint) == 7


# -- files of somebody who can compute checksums ---------------------------------------------


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / MANIFEST).read_bytes())
    change(content)
    written = json.dumps(content).encode()
    (path / MANIFEST).write_bytes(written)
    (path / CHECKSUM).write_bytes(checksum_line(written))


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Put a file in the place of one, and say in the manifest that it is right."""
    import hashlib

    (path / name).write_bytes(content)

    def change(manifest: dict[str, Any]) -> None:
        partition = manifest["partitions"][0]
        for entry in [partition["tags"], *partition["values"]]:
            if entry["name"] == name:
                entry["nbytes"] = len(content)
                entry["sha256"] = hashlib.sha256(content).hexdigest()

    change_manifest(path, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format="other"),
        lambda m: m.update(version=0),
        lambda m: m.update(version="1"),
        lambda m: m.update(more=1),
        lambda m: m.pop("n"),
        lambda m: m.update(n=-1),
        lambda m: m.update(n=1.5),
        lambda m: m.update(n=1 << 70),
        lambda m: m.update(saved_at=float("inf")),
        lambda m: m["partitions"].append(m["partitions"][0]),
        lambda m: m["partitions"][0].update(partition_id="a\nb"),
        lambda m: m["partitions"][0].update(partition_id=""),
        lambda m: m["partitions"][0].update(rows=21),
        lambda m: m["partitions"][0].update(sealed=1),
        lambda m: m["partitions"][0].update(quota={"bytes": -1}),
        lambda m: m["partitions"][0].update(quota={"strange": 1}),
        lambda m: m["partitions"][0].update(retention={"versions": 0}),
        lambda m: m["partitions"][0]["fields"]["x"].update(dtype="int33"),
        lambda m: m["partitions"][0]["fields"]["x"].update(rank=99),
        lambda m: m["partitions"][0]["fields"]["x"].update(ragged_dim=None),
        lambda m: m["partitions"][0]["tags"].update(name="../../etc/passwd"),
        lambda m: m["partitions"][0]["tags"].update(name="0-tags.parquet/x"),
        lambda m: m["partitions"][0]["tags"].update(name=m["partitions"][0]["values"][0]["name"]),
        lambda m: m["partitions"][0]["tags"].update(sha256="0"),
        lambda m: m["partitions"][0]["values"][0].update(rows=19),
        lambda m: m["partitions"][0].update(values=[]) or m["partitions"][0].update(rows=3),
    ],
)
def test_a_manifest_that_no_save_writes_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    change_manifest(checkpoint, change)
    damaged(checkpoint, MANIFEST)


def test_a_manifest_of_endless_depth_is_refused(checkpoint: Path) -> None:
    for content in (b"[" * 100_000, b"{}", b"[]", b"\xff", b""):
        (checkpoint / MANIFEST).write_bytes(content)
        (checkpoint / CHECKSUM).write_bytes(checksum_line(content))
        damaged(checkpoint, MANIFEST)


def parquet(checkpoint: Path, change: Callable[[Any], Any] = lambda t: t, **options: Any) -> bytes:
    """The tags file written anew in another way."""
    table = change(pq.read_table(checkpoint / FILES[0]))
    sink = pa.BufferOutputStream()
    plain: dict[str, Any] = {
        "compression": "none", "use_dictionary": False, "write_statistics": False,
    }  # fmt: skip
    pq.write_table(table, sink, **{**plain, **options})
    return sink.getvalue().to_pybytes()


def test_a_tags_file_written_by_plain_pyarrow_in_the_same_way_is_right(checkpoint: Path) -> None:
    replace_file(checkpoint, FILES[0], parquet(checkpoint))
    assert verify_checkpoint(checkpoint)["rows"] == ROWS


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"}, {"compression": "gzip"}, {"use_dictionary": True},
        {"column_encoding": {"revision": "DELTA_BINARY_PACKED"}},
        {"column_encoding": {"key": "DELTA_BYTE_ARRAY"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_tags_file_that_grows_in_memory_is_refused(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    replace_file(checkpoint, FILES[0], parquet(checkpoint, **options))
    assert "row group 0" in str(damaged(checkpoint, FILES[0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.slice(1), "19 rows"),
        (lambda t: pa.concat_tables([t.slice(0, 19), t.slice(0, 1)]), "'k0' is there twice"),
        (lambda t: t.drop_columns(["key"]), "no column"),
        (lambda t: t.append_column("x", t["key"]), "another kind"),
        (lambda t: t.set_column(0, "key", pa.array([None] * 20, pa.string())), "key"),
        (
            lambda t: t.set_column(1, t.schema.field("revision"), pa.array([101] * 20, pa.int64())),
            "later than the revision 100",
        ),
        (
            lambda t: t.set_column(
                t.schema.names.index("tag.mixed"),
                t.schema.field("tag.mixed"),
                pa.array(["{"] * 20, pa.string()),
            ),
            "row group 0",
        ),
    ],
)
def test_a_tags_file_that_no_save_writes_is_refused(
    checkpoint: Path, change: Callable[[Any], Any], says: str
) -> None:
    replace_file(checkpoint, FILES[0], parquet(checkpoint, change))
    assert says in str(damaged(checkpoint, FILES[0]))


def arrow(checkpoint: Path, change: Callable[[Any], Any] = lambda t: t, **options: Any) -> bytes:
    """The values file written anew in another way."""
    with pa.OSFile(str(checkpoint / FILES[1])) as source:
        table = change(pa.ipc.open_file(source).read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_values_file_written_by_plain_pyarrow_is_right(checkpoint: Path) -> None:
    replace_file(checkpoint, FILES[1], arrow(checkpoint))
    assert verify_checkpoint(checkpoint)["rows"] == ROWS


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_values_file_that_grows_in_memory_is_refused(checkpoint: Path, codec: str) -> None:
    replace_file(checkpoint, FILES[1], arrow(checkpoint, compression=codec))
    assert "compressed" in str(damaged(checkpoint, FILES[1]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.slice(1), "19 rows"),
        (lambda t: t.drop_columns(["x.shape"]), "columns"),
        (lambda t: t.drop_columns(["x", "x.shape"]), "no column"),
        (lambda t: t.replace_schema_metadata({"a": "b"}), "columns"),
    ],
)
def test_a_values_file_that_no_save_writes_is_refused(
    checkpoint: Path, change: Callable[[Any], Any], says: str
) -> None:
    replace_file(checkpoint, FILES[1], arrow(checkpoint, change))
    assert says in str(damaged(checkpoint, FILES[1]))


def mutations(content: bytes) -> Iterator[bytes]:
    """The content with bytes changed, more of them where its structure is."""
    random = np.random.default_rng(7)
    for _ in range(400):
        changed = bytearray(content)
        for at in random.integers(0, len(content), random.integers(1, 4)):
            changed[at] = int(random.choice([0, 1, 0x7F, 0x80, 0xFF, int(random.integers(256))]))
        yield bytes(changed)
    for _ in range(50):
        yield content[: int(random.integers(0, len(content)))]


@pytest.mark.parametrize("name", FILES[:2])
def test_no_content_of_a_file_breaks_the_reader(checkpoint: Path, name: str) -> None:
    """Also where its checksum is right: refused with a typed error, or read within its limits."""
    content = (checkpoint / name).read_bytes()
    found: list[str] = []
    for changed in mutations(content):
        replace_file(checkpoint, name, changed)
        try:
            verify_checkpoint(checkpoint)
        except CheckpointDamaged as error:
            found.append(error.file)
    assert set(found) == {name}
    assert len(found) > 100  # most of the others changed a number or a text


def test_tags_of_many_row_groups_and_columns_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "GROUP_ROWS", 10)
    path = saved(tmp_path / "saved", rows=50)
    assert pq.ParquetFile(path / FILES[0]).metadata.num_row_groups == 5
    with Checkpoint(path) as opened:
        rows = list(opened.file(opened.manifest.partitions[0].tags).tags())
    assert [key for part in rows for key in part.keys] == [f"k{i}" for i in range(50)]
    assert [tags["i"] for part in rows for tags in part.tags] == list(range(50))
    assert tables.COMMITTED == -1


def test_leftover_of_a_removed_folder_does_not_stop_a_save(tmp_path: Path) -> None:
    """Somebody else removes it first."""
    left = tmp_path / "saved.partial-0"
    left.mkdir()
    listed = list(tmp_path.iterdir())
    shutil.rmtree(left)
    assert listed == [left]
    assert revision_at(saved(tmp_path / "saved")) == 100
