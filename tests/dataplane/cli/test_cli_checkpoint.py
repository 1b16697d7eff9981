"""`dataplane checkpoint`: saved, looked at without a plane, verified, restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane import Client
from tests.dataplane.cli.conftest import Operator, environment_of
from tests.dataplane.cli.small_run import TRAIN, VAL


@pytest.fixture
def saved(operator: Operator, tmp_path: Path) -> Path:
    path = tmp_path / "step-1"
    operator.ask("checkpoint", "save", str(path))
    return path


def test_save_says_what_it_wrote_and_overwrites_only_when_told(
    plane: Client, operator: Operator, saved: Path
) -> None:
    assert operator.ask("checkpoint", "save", str(saved), ok=False).code == 2
    said = operator.ask("checkpoint", "save", str(saved), "--overwrite", "-o", "json").json
    assert said["path"] == str(saved)
    assert said["rows"] == sum(said["partitions"].values())
    assert said["partitions"][TRAIN] == len(plane.kv_list(TRAIN))
    text = operator.ask("checkpoint", "save", str(saved), "--overwrite").out
    assert f"  {TRAIN}: " in text


def test_inspect_needs_no_plane(operator: Operator, plane: Client, saved: Path) -> None:
    alone = Operator({"DATAPLANE_RUNTIME_DIR": str(saved.parent / "none")})
    found = alone.ask("checkpoint", "inspect", str(saved), "-o", "json").json
    assert (found["plane_name"], found["plane_id"]) == ("train", plane.plane_id)
    of = {each["partition_id"]: each for each in found["partitions"]}
    assert of[TRAIN]["rows"] == len(plane.kv_list(TRAIN))
    assert of[TRAIN]["open_groups"] == 2
    assert {"judge", "trainer"} <= set(of[TRAIN]["tasks"])
    fields = {field["name"]: field for field in of[TRAIN]["fields"]}
    assert (fields["input_ids"]["dtype"], fields["input_ids"]["rank"]) == ("int64", 1)
    assert of[VAL]["value_file_bytes"] > 1_000_000
    assert found["bytes"] == sum(
        path.stat().st_size for path in saved.iterdir() if not path.name.startswith("manifest")
    )
    text = alone.ask("checkpoint", "inspect", str(saved)).out
    assert "input_ids int64[1d]" in " ".join(text.split())
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_verify_is_the_same_at_both_places(operator: Operator, saved: Path) -> None:
    for words in (["verify"], ["checkpoint", "verify"]):
        said = operator.ask(*words, str(saved), "-o", "json").json
        assert (said["whole"], said["rows"] > 0) == (True, True)
        assert ": whole, " in operator.ask(*words, str(saved)).out
    values = next(path for path in sorted(saved.iterdir()) if path.suffix == ".arrow")
    damaged = bytearray(values.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    values.write_bytes(damaged)
    for words in (["verify"], ["checkpoint", "verify"]):
        said = operator.ask(*words, str(saved), "-o", "json", ok=False)
        assert said.code == 1
        assert said.error["error"]["type"] == "CheckpointDamaged"
        assert said.error["error"]["file"] == values.name


def test_the_journal_of_a_plane_is_verified_too(
    operator: Operator, plane: Client, here: dict[str, Any]
) -> None:
    folder = Path(here["runtime_dir"]) / plane.plane_id
    said = operator.ask("verify", str(folder), "-o", "json").json
    assert said["whole"] is True
    assert said["files"]
    assert operator.ask("verify", str(folder)).out


def test_load_fills_an_empty_plane_and_no_other(
    operator: Operator, plane: Client, here: dict[str, Any], saved: Path
) -> None:
    assert operator.ask("checkpoint", "load", str(saved), ok=False).code == 2
    empty = dataplane.init(here, name="empty")
    try:
        other = Operator(environment_of(here, empty))
        said = other.ask("checkpoint", "load", str(saved), "-o", "json").json
        assert said["rows"] == sum(said["partitions"].values())
        assert sorted(empty.kv_list(TRAIN).keys) == sorted(plane.kv_list(TRAIN).keys)
        again = other.ask("checkpoint", "load", str(saved), ok=False)
        assert again.code == 2
    finally:
        empty.close(destroy=True)


def test_what_is_no_checkpoint_is_said(operator: Operator, tmp_path: Path) -> None:
    for words in (["inspect"], ["load"]):
        said = operator.ask("checkpoint", *words, str(tmp_path / "none"), ok=False)
        assert said.code == 2
    (tmp_path / "manifest.json").write_text("{}")
    assert operator.ask("checkpoint", "inspect", str(tmp_path), ok=False).code == 1
