"""`dataplane export`: rows with tags and fields, bit for bit, in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import ipc

import dataplane
from dataplane import Client
from dataplane.checkpoint.tables import from_json
from dataplane.cli.values import exporting
from dataplane.cli.values.field_columns import MARK
from dataplane.cli.values.plain_values import from_text
from dataplane.codec.dtypes import DTYPE_NAME
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.rows_of_every_dtype import DTYPES, SHAPES, bits, rows_of, width
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT, TRAIN

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def read(path: Path) -> Any:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.OSFile(str(path)) as file:
        return ipc.open_file(file).read_all()


def cell_bits(table: Any, name: str, row: int, dtype: torch.dtype) -> bytes | None:
    """The bytes of one cell; None if it is null."""
    column = table.column(name).combine_chunks()
    if not column[row].is_valid:
        return None
    is_list = pa.types.is_large_list(column.type)
    items = column[row].values if is_list else column.slice(row, 1)
    if dtype is torch.bool:
        return bytes(items.to_pylist())
    size = width(dtype)
    data = items.buffers()[1]
    return b"" if data is None else data.to_pybytes()[items.offset * size :][: len(items) * size]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(
    plane: Client, operator: Operator, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    partition = f"export-{kind}-{DTYPE_NAME[dtype]}"
    rows = rows_of(dtype)
    plane.kv_batch_put(["a", "b", "c"], partition, rows)
    plane.kv_put("bare", partition, tags={"n": 1})
    plane.kv_put("some", partition, {"ragged": rows["ragged"][1]})
    to = tmp_path / f"rows.{kind}"
    operator.ask("export", partition, "--to", str(to))
    table = read(to)
    places = {key: row for row, key in enumerate(table.column("key").to_pylist())}
    assert sorted(places) == ["a", "b", "bare", "c", "some"]
    for name, values in rows.items():
        assert table.schema.field(f"field.{name}").metadata[MARK].decode() == DTYPE_NAME[dtype]
        for key, value in zip("abc", values, strict=True):
            assert cell_bits(table, f"field.{name}", places[key], dtype) == bits(value)
        assert cell_bits(table, f"field.{name}", places["bare"], dtype) is None
        if name != "scalar":
            shapes = table.column(f"shape.{name}").to_pylist()
            assert [shapes[places[key]] for key in "abc"] == [list(s) for s in SHAPES[name]]
            assert shapes[places["bare"]] is None
    assert cell_bits(table, "field.ragged", places["some"], dtype) == bits(rows["ragged"][1])
    assert cell_bits(table, "field.matrix", places["some"], dtype) is None


def test_tags_have_typed_columns_and_json_where_types_differ(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    tags: list[dict[str, Any]] = [
        {"n": 1, "f": 0.5, "b": True, "s": "a", "mixed": 1, "spans": [[1, 2]], "none": None},
        {"n": 2, "f": float("nan"), "b": False, "s": "b", "mixed": "x", "key": "a tag"},
    ]
    plane.kv_batch_put(["a", "b"], "tags", None, tags)
    to = tmp_path / "tags.parquet"
    said = operator.ask("export", "tags", "--to", str(to), "-o", "json").json
    table = read(to)
    assert said["columns"] == table.schema.names
    assert (said["rows"], said["left_out"]) == (2, 0)
    types = {field.name: str(field.type) for field in table.schema}
    assert types["tag.n"] == "int64"
    assert types["tag.f"] == "double"
    assert types["tag.b"] == "bool"
    assert types["tag.s"] == "string"
    assert table.column("tag.n").to_pylist() == [1, 2]
    assert table.column("tag.key").to_pylist() == [None, "a tag"]
    assert table.schema.field("tag.mixed").metadata[MARK] == b"json"
    assert [from_json(text) for text in table.column("tag.mixed").to_pylist()] == [1, "x"]
    assert from_json(table.column("tag.spans").to_pylist()[0]) == [[1, 2]]
    assert table.column("tag.none").to_pylist() == ["null", None]


def test_rows_tags_and_fields_are_chosen(operator: Operator, tmp_path: Path) -> None:
    to = tmp_path / "some.arrow"
    said = operator.ask(
        "export", TRAIN, "--to", str(to), "--where", "uid=u1,session_id>=2",
        "--columns", "uid,seq_len", "--fields", "input_ids",
    )  # fmt: skip
    assert "2 rows" in said.out
    table = read(to)
    assert table.schema.names == [
        "key", "tag.seq_len", "tag.uid", "field.input_ids", "shape.input_ids",
    ] or table.schema.names == [
        "key", "tag.uid", "tag.seq_len", "field.input_ids", "shape.input_ids",
    ]  # fmt: skip
    assert table.column("field.input_ids").to_pylist() == [list(range(128)), list(range(160))]
    operator.ask("export", TRAIN, "--to", str(to), "--no-fields")
    assert not [name for name in read(to).schema.names if name.startswith("field.")]


def test_python_values_are_json(plane: Client, operator: Operator, tmp_path: Path) -> None:
    value = {"messages": [{"role": "user", "content": HOSTILE_TEXT}], "raw": b"\0"}
    plane.kv_put("a", "objects-out", {"extra": value, "other": None})
    to = tmp_path / "rows.parquet"
    operator.ask("export", "objects-out", "--to", str(to))
    table = read(to)
    assert from_text(table.column("field.extra").to_pylist()[0]) == value
    assert table.column("field.other").to_pylist() == ["null"]


def test_many_rows_are_written_in_batches_in_order(
    plane: Client, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3000
    keys = [f"k{i:05}" for i in range(count)]
    plane.kv_batch_put(
        keys,
        "many",
        {"x": torch.arange(count * 4).view(count, 4)},
        [{"i": i} for i in range(count)],
    )
    monkeypatch.setattr(exporting, "BATCH_BYTES", 16 << 10)
    to = tmp_path / "many.parquet"
    operator.ask("export", "many", "--to", str(to))
    table = read(to)
    assert table.column("key").to_pylist() == keys
    assert table.column("tag.i").to_pylist() == list(range(count))
    assert table.column("field.x").combine_chunks().flatten().to_pylist() == [*range(count * 4)]
    file = pq.ParquetFile(to)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert max(sizes) <= 2048
    assert len(sizes) > 3


def test_rows_that_go_meanwhile_are_left_out_and_counted(plane: Client, tmp_path: Path) -> None:
    plane.kv_batch_put(["a", "b", "c"], "going", {"x": torch.zeros(3, 2)})
    listing = plane.kv_list("going")
    plane.kv_clear(["b"], "going")
    schema = plane.kv_list_partitions()["going"]["schema"]
    written = exporting.Exporting(plane, listing, schema)
    written.write(tmp_path / "rows.parquet")
    assert written.rows == 2
    assert read(tmp_path / "rows.parquet").column("key").to_pylist() == ["a", "c"]


def test_a_field_that_changed_its_dtype_is_refused_by_name(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    plane.kv_create_partition("open", schema="open")
    plane.kv_put("a", "open", {"x": torch.arange(2)}, {"kind": "ids"})
    plane.kv_put("b", "open", {"x": torch.zeros(2)}, {"kind": "scores"})
    to = tmp_path / "rows.parquet"
    said = operator.ask("export", "open", "--to", str(to), ok=False)
    assert said.code == 7
    assert "field 'x'" in said.err
    assert "int64 of rank 1" in said.err
    assert not list(tmp_path.iterdir())
    for kind, values in (("ids", [[0, 1]]), ("scores", [[0.0, 0.0]])):
        operator.ask("export", "open", "--to", str(to), "--where", f"kind={kind}")
        assert read(to).column("field.x").to_pylist() == values
        for file in ("one.parquet", "one.npz"):
            key = "a" if kind == "ids" else "b"
            operator.ask("get", "open", key, "--to", str(tmp_path / file))
    plane.kv_put("c", "open", tags={"kind": "late"})
    listing = plane.kv_list("open", where={"kind": {"in": ["ids", "late"]}})
    plane.kv_put("c", "open", {"x": torch.zeros(3)})
    later = plane.kv_list("open", where={"kind": {"in": ["ids", "late"]}})
    of = exporting.as_they_are(plane, listing, plane.kv_list_partitions()["open"]["schema"])
    with pytest.raises(dataplane.DataplaneError, match="field 'x'"):
        exporting.Exporting(plane, later, of).write(to)


def test_nothing_is_written_where_the_request_is_wrong(operator: Operator, tmp_path: Path) -> None:
    to = str(tmp_path / "rows.parquet")
    assert operator.ask("export", "nowhere", "--to", to, ok=False).code == 3
    assert operator.ask("export", TRAIN, "--to", to, "--fields", "nope", ok=False).code == 3
    assert operator.ask("export", TRAIN, "--to", to, "--fields", "a,,b", ok=False).code == 2
    assert operator.ask("export", TRAIN, "--to", to, "--where", "uid=", ok=False).code == 2
    assert operator.ask("export", TRAIN, "--to", to[:-8] + ".csv", ok=False).code == 2
    assert not list(tmp_path.iterdir())


def test_an_empty_partition_is_an_empty_file(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    plane.kv_create_partition("empty", schema={"x": ("bfloat16", 1, 0)})
    for kind in ("parquet", "arrow"):
        to = tmp_path / f"rows.{kind}"
        operator.ask("export", "empty", "--to", str(to))
        assert (read(to).num_rows, read(to).schema.names) == (0, ["key", "field.x", "shape.x"])


def test_hostile_names_are_columns_and_print_safely(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    partition = "out [red]\u202e"
    plane.kv_put(HOSTILE_KEY, partition, {"f [x]\u202e": torch.arange(2)}, {"note": HOSTILE_TEXT})
    to = tmp_path / "rows.parquet"
    said = operator.ask("export", partition, "--to", str(to))
    assert all(line.isprintable() for line in said.out.splitlines())
    table = read(to)
    assert table.column("key").to_pylist() == [HOSTILE_KEY]
    assert table.column("tag.note").to_pylist() == [HOSTILE_TEXT]
    assert table.column("field.f [x]\u202e").to_pylist() == [[0, 1]]
