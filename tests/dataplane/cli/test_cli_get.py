"""`dataplane get`: values in a file, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from dataplane import Client
from dataplane.cli.values.field_columns import MARK
from dataplane.cli.values.plain_values import from_text
from dataplane.codec.dtypes import DTYPE_NAME, NUMPY_DTYPE
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.rows_of_every_dtype import DTYPES, SHAPES, bits, rows_of, width
from tests.dataplane.cli.small_run import HOSTILE_KEY, TRAIN

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

KEYS = ["a/b", "c", "d e"]
NOT_IN_SAFETENSORS = {"float8_e8m0fnu", "complex32", "complex128"}


def put_rows(plane: Client, partition: str, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    rows = rows_of(dtype)
    plane.kv_batch_put(KEYS, partition, rows)
    return rows


def column(table: Any, name: str, row: int, dtype: torch.dtype) -> bytes:
    """The bytes of one cell of a Parquet column."""
    cell = table.column(name).combine_chunks()[row]
    items = cell.values if hasattr(cell, "values") and cell.values is not None else None
    if items is None:
        items = table.column(name).combine_chunks().slice(row, 1)
    if dtype is torch.bool:
        return bytes(items.to_pylist())
    size = width(dtype)
    data = items.buffers()[1]
    return b"" if data is None else data.to_pybytes()[items.offset * size :][: len(items) * size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_from_parquet(
    plane: Client, operator: Operator, tmp_path: Path, dtype: torch.dtype
) -> None:
    partition = f"parquet-{DTYPE_NAME[dtype]}"
    rows = put_rows(plane, partition, dtype)
    to = tmp_path / "rows.parquet"
    said = operator.ask("get", partition, *KEYS, "--to", str(to), "-o", "json").json
    assert said["keys"] == KEYS
    assert said["file_bytes"] == to.stat().st_size
    table = pq.read_table(to)
    assert table.column("key").to_pylist() == KEYS
    for name, values in rows.items():
        assert table.schema.field(f"field.{name}").metadata[MARK].decode() == DTYPE_NAME[dtype]
        for row, value in enumerate(values):
            assert column(table, f"field.{name}", row, dtype) == bits(value), (name, row)
        if name != "scalar":
            assert table.column(f"shape.{name}").to_pylist() == [list(s) for s in SHAPES[name]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_keeps_the_dtypes_that_it_knows_and_refuses_the_others(
    plane: Client, operator: Operator, tmp_path: Path, dtype: torch.dtype
) -> None:
    partition = f"safetensors-{DTYPE_NAME[dtype]}"
    rows = put_rows(plane, partition, dtype)
    to = tmp_path / "rows.safetensors"
    said = operator.ask("get", partition, *KEYS, "--to", str(to), ok=False)
    if DTYPE_NAME[dtype] in NOT_IN_SAFETENSORS:
        assert said.code == 2
        assert "write .parquet" in said.err
        assert not list(tmp_path.iterdir())
        return
    assert said.code == 0, said.err
    opened: Any = safe_open(to, "pt")
    with opened as file:
        assert json.loads(file.metadata()["keys"]) == KEYS
        for name, values in rows.items():
            for key, value in zip(KEYS, values, strict=True):
                got = file.get_tensor(f"{key}/{name}")
                assert (got.dtype, got.shape) == (dtype, value.shape)
                assert bits(got) == bits(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_npz_keeps_the_dtypes_of_numpy_and_says_where_the_others_are_kept(
    plane: Client, operator: Operator, tmp_path: Path, dtype: torch.dtype
) -> None:
    partition = f"npz-{DTYPE_NAME[dtype]}"
    rows = put_rows(plane, partition, dtype)
    to = tmp_path / "rows.npz"
    said = operator.ask("get", partition, *KEYS, "--to", str(to), ok=False)
    if DTYPE_NAME[dtype] not in NUMPY_DTYPE:
        assert said.code == 2
        usable = ".parquet" if DTYPE_NAME[dtype] in NOT_IN_SAFETENSORS else ".safetensors or"
        assert f"write {usable}" in said.err
        assert not list(tmp_path.iterdir())
        return
    assert said.code == 0, said.err
    with np.load(to, allow_pickle=False) as file:
        assert file["keys"].tolist() == KEYS
        for name, values in rows.items():
            for key, value in zip(KEYS, values, strict=True):
                got = file[f"{key}/{name}"]
                assert (got.dtype, got.shape) == (NUMPY_DTYPE[DTYPE_NAME[dtype]], value.shape)
                assert got.tobytes() == bits(value)


OBJECTS: list[Any] = [
    {"a": [1, 2.5, None, True], "$b": b"\0\1", 3: (1, 2), "big": 1 << 80, "c": 1 + 2j},
    "\x1b[31m\0 [red] \u202e",
    float("nan"),
]


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_python_values_are_json_from_which_the_same_value_comes(
    plane: Client, operator: Operator, tmp_path: Path, kind: str
) -> None:
    values = [*OBJECTS, {"t": torch.arange(3, dtype=torch.bfloat16), "s": np.float32(0.1)}]
    keys = [str(i) for i in range(len(values))]
    plane.kv_batch_put(keys, "objects", {"extra": values})
    to = tmp_path / f"rows.{kind}"
    operator.ask("get", "objects", *keys, "--to", str(to))
    if kind == "npz":
        with np.load(to, allow_pickle=False) as file:
            texts = [str(file[f"{key}/extra.json"]) for key in keys]
    elif kind == "safetensors":
        opened: Any = safe_open(to, "pt")
        with opened as file:
            texts = [file.metadata()[f"{key}/extra"] for key in keys]
    else:
        table = pq.read_table(to)
        assert table.schema.field("field.extra").metadata[MARK] == b"json"
        texts = table.column("field.extra").to_pylist()
    back = [from_text(text) for text in texts]
    assert back[:2] == values[:2]
    assert type(back[0][3]) is tuple
    assert np.isnan(back[2])
    assert torch.equal(back[3]["t"], values[3]["t"])
    assert back[3]["t"].dtype == torch.bfloat16
    assert back[3]["s"] == np.float32(0.1)
    assert type(back[3]["s"]) is np.float32


def test_fields_are_chosen_and_the_table_says_what_was_written(
    operator: Operator, tmp_path: Path
) -> None:
    to = tmp_path / "rows.npz"
    said = operator.ask(
        "get", TRAIN, "u1_0_0", "u1_0_0", "u1_1_0", "--fields", "labels,input_ids", "--to", str(to)
    )
    assert "2 rows with" in said.out
    with np.load(to) as file:
        assert file["keys"].tolist() == ["u1_0_0", "u1_1_0"]
        assert sorted(file.files) == sorted(
            ["keys", *(f"u1_{s}_0/{name}" for s in (0, 1) for name in ("labels", "input_ids"))]
        )


def test_what_is_not_there_is_named_and_no_file_is_left(operator: Operator, tmp_path: Path) -> None:
    to = tmp_path / "rows.npz"
    to.write_text("what was there before")
    said = operator.ask(
        "get", TRAIN, "u1_0_0", "no\u202esuch", "--to", str(to), "-o", "json", ok=False
    )
    assert said.code == 3
    assert said.error["error"]["type"] == "KeyNotFound"
    assert said.error["error"]["keys"] == ["no\u202esuch"]
    said = operator.ask("get", TRAIN, "u1_0_0", "-f", "nothing", "--to", str(to), ok=False)
    assert said.code == 3
    said = operator.ask("get", "nowhere", "a", "--to", str(to), ok=False)
    assert (said.code, "no partition 'nowhere'" in said.err) == (3, True)
    assert to.read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npz"]


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_read(
    operator: Operator, tmp_path: Path
) -> None:
    for name in ("rows.pt", "rows", "no/folder/rows.npz"):
        said = operator.ask("get", TRAIN, "u1_0_0", "--to", str(tmp_path / name), ok=False)
        assert said.code == 2
    assert not list(tmp_path.iterdir())


def test_a_hostile_key_is_an_entry_and_prints_safely(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    plane.kv_put(HOSTILE_KEY, "hostile", {"x": torch.arange(3)})
    to = tmp_path / "rows.npz"
    said = operator.ask("get", "hostile", HOSTILE_KEY, "--to", str(to), "-o", "csv")
    assert said.out.isascii() or "\u202e" not in said.out
    with np.load(to) as file:
        assert file["keys"].tolist() == [HOSTILE_KEY]
        assert file[f"{HOSTILE_KEY}/x"].tolist() == [0, 1, 2]


def test_two_cells_that_would_share_an_entry_are_refused(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    plane.kv_put("a", "shared", {"b/c": torch.arange(2)})
    plane.kv_put("a/b", "shared", {"c": torch.arange(2), "b/c": torch.arange(2)})
    plane.kv_put("a", "shared", {"c": torch.arange(2)})
    to = str(tmp_path / "rows.npz")
    said = operator.ask("get", "shared", "a", "a/b", "--to", to, ok=False)
    assert said.code == 2
    assert "one key at a time" in said.err
