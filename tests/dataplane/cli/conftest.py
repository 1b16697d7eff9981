"""A live plane with a small run in it, and an operator who types commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner

import dataplane
from dataplane import Client, DataplaneError
from dataplane.cli.main import app
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import grant_record, limits_record, token_record
from dataplane.gateway.access.tokens import new_token
from tests.contract.planes import SETTINGS
from tests.dataplane.cli.small_run import TRAIN, put_run
from tests.deadline import eventually

COMMAND = [sys.executable, "-m", "dataplane.cli.main"]
TIMEOUT_S = 60.0
TOKEN_ID = "mzxw6ytboi2w"


@dataclass
class Said:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The JSON object on standard error."""
        return json.loads(self.err.splitlines()[-1])


@dataclass
class Operator:
    """Who types commands: each with these variables in its environment."""

    environment: dict[str, str] = field(default_factory=dict[str, str])

    def run(self, *words: str, ok: bool = True, **variables: str) -> Said:
        """A command as a process of its own."""
        done = subprocess.run(
            [*COMMAND, *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**self.variables(), **variables},
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert not ok or said.code == 0, said.err
        return said

    def ask(self, *words: str, ok: bool = True) -> Said:
        """A command in this process, which is faster."""
        # Removed for the time of the call, where the variable is None.
        env: dict[str, str | None] = {"COLUMNS": "80", "NO_COLOR": "1", **self.environment}
        result = CliRunner().invoke(app, list(words), env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        said = Said(result.exit_code, result.stdout, result.stderr)
        assert not ok or said.code == 0, said.err
        return said

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """A command that goes on, as a process of its own."""
        return subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.variables(), **variables},
        )

    def variables(self) -> dict[str, str]:
        """The environment of its processes: nothing of this one's names a plane."""
        own = {name: value for name, value in os.environ.items() if "DATAPLANE" not in name}
        return {**own, "COLUMNS": "80", "NO_COLOR": "1", **self.environment}


@pytest.fixture(scope="module")
def here(roots: dict[str, Path]) -> dict[str, Any]:
    """Settings of the planes of one test module: in folders of its own."""
    return {**SETTINGS, **roots, "host": "embedded"}


@pytest.fixture(scope="module")
def plane(here: dict[str, Any]) -> Iterator[Client]:
    """A plane called `train` with the small run; a consumer waits there for two whole groups, and
    another for rows that nobody has made."""
    client = dataplane.init(here, name="train")
    waiting = dataplane.connect("train", config=here)
    with ThreadPoolExecutor(2) as consumers:
        try:
            put_run(client, lambda: dataplane.connect("train", config=here))
            consumers.submit(_wait, waiting)
            consumers.submit(_claim, waiting)
            eventually(lambda: sum(client.status()["waiting"].values()) == 2, "they wait")
            yield client
        finally:
            client.close(destroy=True)
            waiting.close()


def _wait(client: Client) -> None:
    try:
        client.kv_wait(TRAIN, {"status": "completed"}, count=2, group_by="uid", timeout=600)
    except DataplaneError:
        pass  # the plane has ended


def _claim(client: Client) -> None:
    try:
        client.kv_claim(TRAIN, "ref", count=8, fields=["old_logprobs"], timeout=600)
    except DataplaneError:
        pass


@pytest.fixture
def operator(plane: Client, here: dict[str, Any]) -> Operator:
    """An operator on the machine of the plane."""
    return Operator(environment_of(here, plane))


def environment_of(here: dict[str, Any], plane: Client) -> dict[str, str]:
    """How commands find a plane by its address."""
    folder = Path(here["runtime_dir"]) / plane.plane_id
    return {
        "DATAPLANE_RUNTIME_DIR": str(here["runtime_dir"]),
        "DATAPLANE_SHM_DIR": str(here["shm_dir"]),
        "DATAPLANE_HOST": "embedded",  # whatever Ray cluster others have here is none of ours
        "DATAPLANE_ADDRESS": str(folder / "plane.sock"),
    }


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer on this machine, whose token n is the word `w` and n."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(256)} | {"?": 256}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def desk(
    tmp_path_factory: pytest.TempPathFactory, plane: Client, here: dict[str, Any]
) -> dict[str, Any]:
    """An operator's folder with what examples take up, and the environment of its shell."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "bin").mkdir()
    command = folder / "bin" / "dataplane"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dataplane.cli.main "$@"\n')
    command.chmod(0o755)
    (folder / "data" / "checkpoints").mkdir(parents=True)
    plane.save_checkpoint(folder / "data" / "checkpoints" / "step-100")
    _make_tokens(folder / "tokens.json")
    _make_certificates(folder)
    variables = Operator(environment_of(here, plane)).variables()
    del variables["DATAPLANE_ADDRESS"]
    variables["DATAPLANE_NAME"] = "train"
    return {
        "cwd": folder,
        "env": {
            **variables,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
    }


def _make_tokens(path: Path) -> None:
    token = new_token()
    record = token_record(
        token_id=TOKEN_ID,
        sha256=token.sha256,
        principal="rollout-6",
        created_s=time.time(),
        expires_s=None,
        grants=(grant_record(partition="train*", roles=("producer",), verbs=(), fields=None),),
        limits=limits_record(),
    )
    change_records(path, lambda records: (records.with_token(record), None))


def _make_certificates(folder: Path) -> None:
    certificate = trustme.CA().issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "c.pem")
    certificate.private_key_pem.write_to_path(folder / "k.pem")
    (folder / "k.pem").chmod(0o600)
