"""`dataplane put`: tags and fields from the command line, and files that are no good."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dataplane import Client
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT

PARTITION = "by-hand"


def value_of(plane: Client, key: str, name: str) -> Any:
    return plane.kv_batch_get([key], PARTITION, [name], layout="list")[name][0]


def tags_of(plane: Client, key: str) -> dict[str, Any]:
    report = plane.inspect([key], PARTITION)[0]
    assert report is not None
    return report.tags


def test_tags_are_text_or_json(plane: Client, operator: Operator) -> None:
    said = operator.ask(
        "put", PARTITION, "t", "-t", "status=done", "-t", "n:=3", "-t", "a=b=c", "-t", "empty=",
        "-t", 'spans:=[[1,2],{"x":null}]', "-t", "number=7", "-o", "json",
    ).json  # fmt: skip
    tags = {
        "status": "done",
        "n": 3,
        "a": "b=c",
        "empty": "",
        "spans": [[1, 2], {"x": None}],
        "number": "7",
    }
    assert said["tags"] == tags
    assert tags_of(plane, "t") == tags
    assert said["revision"][1] > 0


def test_tags_merge_and_conditions_hold(plane: Client, operator: Operator) -> None:
    said = operator.ask("put", PARTITION, "c", "--tag", "a=1", "--must-exist", ok=False)
    assert said.code == 3
    operator.ask("put", PARTITION, "c", "--tag", "a=1", "--if-absent")
    said = operator.ask("put", PARTITION, "c", "--tag", "b=1", "--if-absent", ok=False)
    assert said.code == 7
    operator.ask("put", PARTITION, "c", "--tag", "b=2", "--must-exist")
    assert tags_of(plane, "c") == {"a": "1", "b": "2"}


def test_json_numbers_are_of_the_dtype_that_the_field_has(
    plane: Client, operator: Operator
) -> None:
    said = operator.ask(
        "put", PARTITION, "j", "-f", "input_ids=[1,2,3]", "-f", "logprobs=[0,-0.5,-1]",
        "-f", "note=[1,2]", "-f", 'extra={"why": "a [red] one"}', "-f", "mark=7",
    )  # fmt: skip
    assert "input_ids: int64 [3] 24 B" in said.out
    assert torch.equal(value_of(plane, "j", "input_ids"), torch.tensor([1, 2, 3]))
    assert value_of(plane, "j", "logprobs").dtype == torch.float32
    assert value_of(plane, "j", "note") == [1, 2]
    assert value_of(plane, "j", "extra") == {"why": "a [red] one"}
    plane.kv_put("first", PARTITION, {"small": torch.tensor([1, 2], dtype=torch.uint8)})
    operator.ask("put", PARTITION, "j", "-f", "small=[255,0]")
    assert value_of(plane, "j", "small").tolist() == [255, 0]


@pytest.mark.parametrize(
    "field",
    [
        "small=[256]",
        "small=[-1]",
        "small=[1.5]",
        'small=["a"]',
        "small=[true]",
        "small=[[1],[1,2]]",
        "small=hello",
        "small=[1,2",
        "extra=NaN",
        'extra={"$nothing": 1}',
        'extra={"$tensor": ["int64", [2], "AAAA"]}',
        "=[1]",
        "small",
    ],
)
def test_json_that_a_field_cannot_hold_is_refused(
    plane: Client, operator: Operator, field: str
) -> None:
    plane.kv_put("first", PARTITION, {"small": torch.tensor([1, 2], dtype=torch.uint8)})
    said = operator.ask("put", PARTITION, "refused", "-f", field, ok=False)
    assert said.code == 2, said.err
    assert plane.inspect(["refused"], PARTITION) == [None]


def test_files_of_every_kind_are_put(plane: Client, operator: Operator, tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    np.save(tmp_path / "rows.npy", np.asfortranarray(ids))
    np.savez(tmp_path / "one.npz", only=ids)
    np.savez(tmp_path / "two.npz", a=ids, b=ids[0])
    brain = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    save_file({"w": brain, "v": torch.zeros(0)}, tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text(json.dumps({"a": {"$bytes": "AAE="}}))
    (tmp_path / "x.txt").write_text("a text\n")
    at = str(tmp_path)
    operator.ask(
        "put", PARTITION, "files", "-f", f"npy=@{at}/rows.npy", "-f", f"one=@{at}/one.npz",
        "-f", f"two=@{at}/two.npz:b", "-f", f"brain=@{at}/x.safetensors:w",
        "-f", f"none=@{at}/x.safetensors:v", "-f", f"map=@{at}/x.json", "-f", f"text=@{at}/x.txt",
    )  # fmt: skip
    assert torch.equal(value_of(plane, "files", "npy"), torch.from_numpy(ids))
    assert torch.equal(value_of(plane, "files", "one"), torch.from_numpy(ids))
    assert torch.equal(value_of(plane, "files", "two"), torch.from_numpy(ids[0]))
    assert torch.equal(value_of(plane, "files", "brain"), brain)
    assert value_of(plane, "files", "none").shape == (0,)
    assert value_of(plane, "files", "map") == {"a": b"\0\1"}
    assert value_of(plane, "files", "text") == "a text\n"


def test_what_get_wrote_can_be_put(plane: Client, operator: Operator, tmp_path: Path) -> None:
    plane.kv_put("from", PARTITION, {"w": torch.rand(2, 3).to(torch.float8_e5m2)})
    to = tmp_path / "row.safetensors"
    operator.ask("get", PARTITION, "from", "--to", str(to))
    operator.ask("put", PARTITION, "to", "-f", f"w=@{to}:from/w")
    one, other = value_of(plane, "from", "w"), value_of(plane, "to", "w")
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert other.dtype == torch.float8_e5m2


class Run:
    """Says that it was unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def _npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def _zip(**entries: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def _header(shape: str, descr: str = "<i8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode()


WHOLE = _npy(np.arange(100))
PICKLED = _npy(np.array([Run()], dtype=object))

BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "a pickle": ("npy", pickle.dumps(Run()), "no .npy file"),
    "objects": ("npy", PICKLED, "pickle"),
    "objects in a npz": ("npz", _zip(a=PICKLED), "pickle"),
    "a pickle in a npz": ("npz", _zip(a=pickle.dumps(Run())), "no .npy file"),
    "cut short": ("npy", WHOLE[:-8], "cut short"),
    "too long": ("npy", WHOLE + b"x", "damaged"),
    "no header": ("npy", WHOLE[:40], "no .npy file"),
    "empty": ("npy", b"", "no .npy file"),
    "larger than memory": ("npy", _header("(1 << 50,)".replace("1 << 50", str(1 << 50))), "cut"),
    "a call in the header": ("npy", _header("(print('unpickled'),)"), "no .npy file"),
    "a negative size": ("npy", _header("(-5,)") + bytes(8), "damaged"),
    "cut npz": ("npz", _zip(a=WHOLE)[:-30], "no whole .npz"),
    "cut entry": ("npz", _zip(a=WHOLE[:-8]), "cut short"),
    "two entries": ("npz", _zip(a=WHOLE, b=WHOLE), "say which"),
    "no zip": ("npz", b"hello", "no whole .npz"),
    "text": ("npy", _npy(np.array(["a", "b"])), "cannot be stored"),
    "dates": ("npy", _npy(np.array(["2020-01-01"], dtype="datetime64[D]")), "cannot be stored"),
    "a record": ("npy", _npy(np.zeros(2, dtype=[("a", "i4")])), "cannot be stored"),
    "no safetensors": ("safetensors", b"\xff" * 64, "no whole .safetensors"),
    "empty safetensors": ("safetensors", b"", "no whole .safetensors"),
    "no json": ("json", b"{", "no"),
    "no text": ("txt", b"\xff\xfe\xff", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_good_is_named_and_nothing_is_run(
    plane: Client, operator: Operator, tmp_path: Path, name: str, capfd: Any
) -> None:
    kind, content, why = BAD_FILES[name]
    path = tmp_path / f"bad.{kind}"
    path.write_bytes(content)
    said = operator.ask("put", PARTITION, "bad", "-f", f"x=@{path}", ok=False)
    assert said.code == 2, said.err
    assert why in said.err
    assert "unpickled" not in said.out + capfd.readouterr().out
    assert plane.inspect(["bad"], PARTITION) == [None]


def test_a_file_that_is_not_there_or_of_no_kind_is_refused(
    operator: Operator, tmp_path: Path
) -> None:
    for of in ("none.npy", "x.pt", "x.pkl", "x.npy:entry", ""):
        said = operator.ask("put", PARTITION, "bad", "-f", f"x=@{tmp_path}/{of}", ok=False)
        assert said.code == 2, said.err


def test_a_wrong_dtype_is_the_planes_own_error(
    plane: Client, operator: Operator, tmp_path: Path
) -> None:
    plane.kv_put("first", PARTITION, {"ids": torch.arange(3)})
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    said = operator.ask(
        "put", PARTITION, "other", "-f", f"ids=@{tmp_path}/x.npy", "-o", "json", ok=False
    )
    assert said.code != 0
    assert said.error["error"]["type"] == "SchemaMismatch"
    assert said.error["error"]["fields"] == ["ids"]


def test_wrong_requests_are_said_and_put_nothing(plane: Client, operator: Operator) -> None:
    for words in (
        [], ["-t", "x"], ["-t", "x:=[1"], ["-t", "x:=NaN"], ["-t", "=a"],
        ["-t", "a=1", "--must-exist", "--if-absent"], ["-t", "dataplane.lost=1"],
    ):  # fmt: skip
        said = operator.ask("put", PARTITION, "wrong", *words, ok=False)
        assert said.code == 2, (words, said.err)
    assert plane.inspect(["wrong"], PARTITION) == [None]


def test_hostile_keys_and_tags_print_safely(operator: Operator) -> None:
    said = operator.ask("put", PARTITION, HOSTILE_KEY, "-t", f"note={HOSTILE_TEXT}")
    assert "\\u202e" in said.out
    assert said.out.replace("\n", "").isprintable()
    said = operator.ask("put", PARTITION, "\x1b[31mkey", "-t", "a=1", ok=False)
    assert said.code == 2
    assert said.err.replace("\n", "").isprintable()
