"""`dataplane report`: of a run that is over, of a plane that is there, of neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dataplane
from dataplane import Client
from dataplane.cli.main import app
from dataplane.report.write import keep_record
from tests.contract.planes import SETTINGS
from tests.dataplane.report.made_up import plane_of, write_run


@pytest.fixture
def client(roots: dict[str, Path]) -> Iterator[Client]:
    settings: dict[str, Any] = {**SETTINGS, **{k: str(v) for k, v in roots.items()}}
    client = dataplane.init({**settings, "host": "embedded"}, name="reported")
    yield client
    client.close(destroy=True)


def test_a_run_that_is_over_is_reported_without_a_plane(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    keep_record(plane_of(20), run)
    said = CliRunner().invoke(app, ["report", "--run", str(run)])
    assert said.exit_code == 0, said.output
    assert said.output.strip() == str(run / "report.html")
    assert "up to step 12" in (run / "report.html").read_text()


def test_a_plane_that_is_there_is_reported(
    client: Client, roots: dict[str, Path], tmp_path: Path
) -> None:
    attempt = client.begin_group("u-reported", "train", n=1)
    client.end_group(attempt, "failure")
    out = tmp_path / "plane.html"
    words = ["report", "--out", str(out), "--name", "reported"]
    said = CliRunner().invoke(app, words, env={"DATAPLANE_RUNTIME_DIR": str(roots["runtime_dir"])})
    assert said.exit_code == 0, said.output
    text = out.read_text()
    assert "u-reported" in text
    assert client.plane_id in text


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["report", "--run", str(tmp_path / "absent")])
    assert said.exit_code == 2
    assert "no run folder" in said.output
    assert not list(tmp_path.iterdir())
