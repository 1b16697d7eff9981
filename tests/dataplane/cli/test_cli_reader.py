"""Every command that only looks, for somebody outside who may read and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane import Client
from dataplane.cli.exits import Code
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.small_run import TRAIN
from tests.dataplane.outside.gateways import gateway, token_for

READS = ["read", "list", "wait", "explain"]
GRANTS = {
    "reads": {"*": READS},
    "reads-one": {TRAIN: READS},
    "operates-one": {TRAIN: [*READS, "operate"]},
}
LOOKS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("partitions",),
    ("keys", TRAIN, "--sort", "seq_len", "--limit", "3"),
    ("show", TRAIN, "u1_0_0"),
    ("show", TRAIN, "u2"),
    ("stats", TRAIN),
    ("waiters",),
    ("top", "--once"),
    ("why", TRAIN),
    ("trace", "u1", "--partition", TRAIN),
    ("tail", TRAIN, "--timeout", "0.2"),
    ("doctor",),
    ("config",),
)


@pytest.fixture(scope="module", params=GRANTS)
def outsider(
    request: pytest.FixtureRequest,
    plane: Client,
    here: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Operator]:
    """An operator with a token for little, who reaches the plane through a gateway only."""
    folder = tmp_path_factory.mktemp("tokens")
    socket = Path(here["runtime_dir"]) / "few.sock"
    token = token_for(folder, request.param, GRANTS[request.param])
    with gateway("train", here, listen=(f"unix:{socket}",), token_file=folder / "tokens.json"):
        yield Operator(
            {
                "DATAPLANE_RUNTIME_DIR": f"{here['runtime_dir']}/none",
                "DATAPLANE_ADDRESS": f"grpc+unix://{socket}",
                "DATAPLANE_TOKEN_FILE": str(token),
            }
        )
    socket.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("words", "form"),
    [
        pytest.param(words, form, id=f"{' '.join(words[:2])}-{form}")
        for words in LOOKS
        for form in ("table", "json", "yaml", "csv")
        if (words[0], form) != ("top", "csv")  # a frame of top is no table
    ],
)
def test_who_may_only_read_is_shown_what_is_told(
    outsider: Operator, words: tuple[str, ...], form: str
) -> None:
    said = outsider.ask(*words, "-o", form, ok=words[0] != "doctor")
    assert said.code in (Code.FINE, Code.BAD)
    assert said.out or words[0] == "tail"
    assert "()" not in said.out
    if form == "table" and words[0] != "why":  # an explanation is sentences
        assert [line for line in said.out.splitlines() if len(line) > 80] == []


def test_clients_are_named_to_who_may_operate_there(outsider: Operator) -> None:
    told = "operates" in outsider.environment["DATAPLANE_TOKEN_FILE"]
    label = f"pid {os.getpid()}"
    for words in (("show", TRAIN, "u1_0_0"), ("stats", TRAIN)):
        said = outsider.ask(*words).out
        assert (label in said) == told, words
        assert told or "(not told)" in said
    rows = outsider.ask("trace", "u1", "--partition", TRAIN, "-o", "json").json["rows"]
    assert {row["client"][0] == "#" for row in rows} == {not told}
    # Whoever may ask why something waits is told for whom: the one exception.
    assert label in outsider.ask("why", TRAIN).out


def test_a_status_says_who_asks_and_nothing_of_the_whole_plane(outsider: Operator) -> None:
    said = outsider.ask("status").out
    assert "through a gateway" in said
    assert "STORE" not in said
    assert "clients" not in said


@pytest.mark.parametrize(
    "words",
    [
        ("clear", TRAIN, "--all", "--yes"),
        ("release", TRAIN, "--task", "trainer", "--yes"),
        ("put", TRAIN, "k", "-t", "a=1"),
        ("check", "perf"),
        ("report", "--out", "/dev/null/report.html"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_not_for_everybody_is_refused_and_changes_nothing(
    outsider: Operator, plane: Client, words: tuple[str, ...]
) -> None:
    before = plane.kv_list(TRAIN).revision
    said = outsider.ask(*words, ok=False)
    assert said.code == Code.DENIED, said.out + said.err
    assert "may not" in said.err
    assert plane.kv_list(TRAIN).revision == before
