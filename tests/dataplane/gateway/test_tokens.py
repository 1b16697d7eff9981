"""Tokens: made once, kept as hashes, found in constant work, and a file that is followed safely."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
import threading
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dataplane.cli.run.tokens import expiry, tokens
from dataplane.errors import InvalidRequest
from dataplane.gateway.access.limits import Limits
from dataplane.gateway.access.redaction import RedactTokens, redact
from dataplane.gateway.access.roles import ROLES, Grant, Principal
from dataplane.gateway.access.token_disk import change_records, read_records
from dataplane.gateway.access.token_records import (
    Records,
    grant_record,
    limits_record,
    token_record,
)
from dataplane.gateway.access.tokens import NewToken, TokenFile, new_token, split_token

NOW = 1_800_000_000.0
NOBODY = "dpt_" + "a" * 12 + "_" + "A" * 43


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def add(path: Path, principal: str = "rollout", expires_s: float | None = None) -> NewToken:
    """A token in the file, which it makes where there is none."""
    token = new_token()
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal=principal,
        created_s=NOW,
        expires_s=expires_s,
        grants=(grant_record(partition="train*", roles=("producer",), verbs=(), fields=None),),
        limits=limits_record(calls_per_s=100),
    )
    change_records(path, lambda records: (records.with_token(record), None))
    return token


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


# ---- the text ---------------------------------------------------------------------------------


def test_a_token_has_a_public_and_a_secret_part() -> None:
    token = new_token()
    parts = split_token(token.text)
    assert parts is not None
    assert parts[0] == token.id
    assert token.sha256 == hashlib.sha256(parts[1].encode()).hexdigest()
    assert len(token.text) == 60
    assert parts[1] not in repr(token)


def test_tokens_are_made_of_enough_chance() -> None:
    asked: list[int] = []

    def random_bytes(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    new_token(random_bytes)
    assert asked[1] == 32
    assert len({new_token().text for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "text",
    ["", "dpt", NOBODY[:-1], NOBODY + "A", NOBODY.upper(), " " + NOBODY, NOBODY + "\n",
     NOBODY.replace("dpt", "dpx"), NOBODY.replace("aaaa", "aa1a"), NOBODY.replace("AA", "A+"),
     NOBODY.replace("AA", "é" * 2), "x" * 10_000],
)  # fmt: skip
def test_what_has_another_shape_is_no_token(text: str) -> None:
    assert split_token(text) is None


# ---- the file ---------------------------------------------------------------------------------


def test_a_token_is_found_again_and_the_file_keeps_no_secret(path: Path) -> None:
    token = add(path)
    assert token.text.split("_", 2)[2][:20] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file = TokenFile(path)
    assert file.find(token.text) == Principal(
        "rollout", (Grant("train*", ROLES["producer"]),), Limits(calls_per_s=100), token.id
    )
    assert os.listdir(path.parent) == [path.name]


def test_another_secret_another_id_and_nonsense_are_not_found(path: Path) -> None:
    token, other = add(path), add(path)
    file = TokenFile(path)
    crossed = f"dpt_{token.id}{other.text[16:]}"
    for shown in (crossed, NOBODY, "", "Bearer", token.text[:-1], token.text + "A"):
        assert file.find(shown) is None
    assert file.find(token.text)
    assert file.find(other.text)


def test_a_token_holds_until_it_expires(path: Path) -> None:
    token = add(path, expires_s=NOW + 10)
    clock = Clock(NOW + 9.9)
    file = TokenFile(path, clock=clock)
    principal = file.find(token.text)
    assert principal is not None
    assert file.present(principal) == principal
    clock.now = NOW + 10
    assert file.find(token.text) is None
    assert file.present(principal) is None


def test_whatever_is_shown_costs_one_hash_and_one_comparison(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, expired = add(path), add(path, expires_s=NOW)
    file = TokenFile(path)
    hashed: list[int] = []
    compared: list[tuple[int, int]] = []
    sha256, compare = hashlib.sha256, hmac.compare_digest

    def counting_sha256(data: bytes) -> Any:
        hashed.append(len(data))
        return sha256(data)

    def counting_compare(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hashlib, "sha256", counting_sha256)
    monkeypatch.setattr(hmac, "compare_digest", counting_compare)
    wrong = token.text[:-4] + "AAAA"
    for shown in (token.text, wrong, expired.text, NOBODY, "", "nonsense", "x" * 5000):
        hashed.clear()
        compared.clear()
        file.find(shown)
        assert (hashed, compared) == ([43], [(64, 64)]), shown


def test_changes_are_taken_up_within_a_second(path: Path) -> None:
    first = add(path)
    monotonic = Clock(0.0)
    file = TokenFile(path, monotonic=monotonic)
    second = add(path, "judge")
    assert file.find(second.text) is None
    monotonic.now = 1.0
    found = file.find(second.text)
    assert found is not None
    assert found.name == "judge"
    change_records(path, lambda records: records.without(frozenset({first.id})))
    monotonic.now = 1.9
    assert file.find(first.text)
    monotonic.now = 2.0
    assert file.find(first.text) is None


def test_the_file_is_read_only_when_it_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = add(path)
    monotonic = Clock(0.0)
    file = TokenFile(path, monotonic=monotonic)
    reads: list[Path] = []

    def counting(path: Path) -> Records:
        reads.append(path)
        return read_records(path)

    monkeypatch.setattr("dataplane.gateway.access.tokens.read_records", counting)
    for _ in range(100):
        monotonic.now += 10
        assert file.find(token.text)
    assert reads == []
    add(path)
    for _ in range(100):
        monotonic.now += 0.001
        file.find(token.text)
    monotonic.now += 1
    file.find(token.text)
    assert len(reads) == 1


@pytest.mark.parametrize("kind", ["no JSON", "gone", "writable", "unknown", "folder", "huge"])
def test_a_broken_file_leaves_the_last_good_one_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    token = add(path)
    good = path.read_bytes()
    monotonic = Clock(0.0)
    file = TokenFile(path, monotonic=monotonic)
    if kind == "no JSON":
        path.write_text(good.decode()[:-20])
    elif kind == "unknown":
        path.write_text(json.dumps({**json.loads(good), "admins": [token.text]}))
    elif kind == "writable":
        path.chmod(0o666)
    elif kind == "huge":
        path.write_bytes(b" " * (17 << 20))
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
    for _ in range(3):
        monotonic.now += 1
        assert file.find(token.text)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "what it said before still holds" in told[0]
    assert str(path) in told[0]
    assert token.text.split("_", 2)[2] not in caplog.text
    # It is mended, and followed again.
    if kind == "folder":
        path.rmdir()
    path.write_bytes(good)
    path.chmod(0o600)
    change_records(path, lambda records: records.without(frozenset({token.id})))
    monotonic.now += 1
    assert file.find(token.text) is None


def test_a_gateway_does_not_start_with_a_file_that_it_cannot_use(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="make one with `dataplane token create`"):
        TokenFile(path)
    path.write_text("{")
    path.chmod(0o600)
    with pytest.raises(InvalidRequest, match="is no JSON, line 1"):
        TokenFile(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidRequest, match="is no JSON"):
        TokenFile(path)
    path.write_text("{}")
    path.chmod(0o620)
    with pytest.raises(InvalidRequest, match="may be written by others"):
        TokenFile(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match="is not a file"):
        TokenFile(path)


def test_a_file_that_is_too_large_takes_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(400 << 20)
    path.chmod(0o600)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="is larger than 16777216 bytes"):
            read_records(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def _document(token: NewToken, **changes: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": token.id, "principal": "a", "sha256": token.sha256,
        "created": "2026-05-01T12:00:00Z", "grants": [{"partition": "*", "roles": ["reader"]}],
        **changes,
    }  # fmt: skip
    return {"version": 1, "tokens": [entry]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha256": NOBODY}, "tokens.0.sha256"),
        ({"id": NOBODY}, "tokens.0.id"),
        ({"grants": []}, "tokens.0.grants"),
        ({"grants": [{"partition": "*"}]}, "at least one verb"),
        ({"grants": [{"partition": "*", "roles": ["root"]}]}, "no role 'root'"),
        (
            {"grants": [{"partition": "*", "verbs": [NOBODY]}]},
            "no verb 'dpt_aaaaaaaaaaaa_\\*\\*\\*",
        ),
        ({"grants": [{"partition": "", "verbs": ["put"]}]}, "tokens.0.grants.0.partition"),
        ({"limits": {"calls_per_second": 5}}, "tokens.0.limits.calls_per_second"),
        ({"limits": {"calls_per_s": 0}}, "tokens.0.limits.calls_per_s"),
        ({"limits": {"open_streams": -1}}, "tokens.0.limits.open_streams"),
        ({"expires": "2026-05-01T12:00:00"}, "tokens.0.expires"),
        ({"expired": "2026-05-01T12:00:00Z"}, "tokens.0.expired"),
        ({"principal": "anyone"}, "no principal may be called 'anyone'"),
        ({"principal": "a\x1b[2J"}, "tokens.0.principal.*cannot be printed"),
    ],
)
def test_what_is_wrong_is_said_where_and_without_quoting_it(
    changes: dict[str, Any], said: str
) -> None:
    data = json.dumps(_document(new_token(), **changes)).encode()
    with pytest.raises(InvalidRequest, match=said) as told:
        Records.parse(data, "tokens.json")
    assert "A" * 43 not in told.value.message


def test_an_id_a_subject_and_a_name_are_there_once() -> None:
    document = _document(new_token())
    document["tokens"] *= 2
    with pytest.raises(InvalidRequest, match="each token id may be there once"):
        Records.parse(json.dumps(document).encode(), "x")
    bound = {"subject": "a", "principal": "b", "grants": [{"partition": "*", "verbs": ["put"]}]}
    with pytest.raises(InvalidRequest, match="each certificate subject may be there once"):
        Records.parse(json.dumps({"certificates": [bound, bound]}).encode(), "x")
    with pytest.raises(InvalidRequest, match="is no JSON"):
        Records.parse(b'{"version": 1, "version": 1}', "x")
    with pytest.raises(InvalidRequest, match="version"):
        Records.parse(b'{"version": 2}', "x")


def test_what_is_written_is_what_is_read() -> None:
    document = _document(
        new_token(),
        expires="2027-05-01T12:00:00Z",
        grants=[{"partition": "a*", "roles": ["reader"], "verbs": ["put"], "fields": ["x"]}],
        limits={"bytes_per_s": 1.5, "clients": 3},
    )
    records = Records.parse(json.dumps(document).encode(), "x")
    assert Records.parse(records.dump(), "x") == records
    (token,) = records.tokens
    assert token.principal.limits == Limits(bytes_per_s=1.5, clients=3)
    assert token.principal.grants[0].fields == {"x"}
    assert token.sha256 not in repr(records)


def test_certificates_are_found_by_their_names(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bound = [
        {"subject": subject, "principal": name, "grants": [{"partition": "*", "verbs": ["put"]}]}
        for subject, name in (("a.example", "a"), ("b.example", "b"))
    ]
    path.write_text(json.dumps({"certificates": bound}))
    path.chmod(0o600)
    file = TokenFile(path)
    found = file.find_certificate(["other.example", "a.example"])
    assert found is not None
    assert (found.name, found.token_id) == ("a", None)
    assert file.present(found, ["a.example"]) == found
    assert file.present(found, ["b.example"]) != found
    assert file.find_certificate(["other.example"]) is None
    assert file.find_certificate([]) is None
    assert file.find_certificate(["a.example", "b.example"]) is None
    assert "bound to several principals" in caplog.text


def test_changes_of_several_at_once_are_all_kept(path: Path) -> None:
    made: list[str] = []

    def many() -> None:
        made.extend(add(path).id for _ in range(5))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(token.id for token in read_records(path).tokens) == sorted(made)
    assert len(made) == 20
    assert os.listdir(path.parent) == [path.name]


def test_a_change_that_fails_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidRequest, match="cannot be written: No space left"):
        add(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    add(real)
    path.symlink_to(real)
    add(path)
    assert path.is_symlink()
    assert len(read_records(real).tokens) == 2


# ---- what others log --------------------------------------------------------------------------


def test_tokens_are_taken_out_of_what_a_handler_logs() -> None:
    token = new_token()
    secret = token.text.split("_", 2)[2]
    assert redact(f"x {token.text} y") == f"x dpt_{token.id}_*** y"
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    logger = logging.Logger("tests.redact")
    handler = Keep()
    handler.addFilter(RedactTokens())
    logger.addHandler(handler)
    logger.warning("metadata %s", (("authorization", f"Bearer {token.text}"),))
    try:
        raise ValueError(f"bad {token.text}")
    except ValueError:
        logger.exception("failed")
    logger.warning("plain %d", 5)
    assert secret[:20] not in "".join(lines)
    assert f"dpt_{token.id}_***" in lines[0]
    assert f"bad dpt_{token.id}_***" in lines[1]
    assert lines[2] == "plain 5"


# ---- the command ------------------------------------------------------------------------------


def run(*args: str) -> Any:
    return CliRunner().invoke(tokens, list(args), env={"COLUMNS": "200"})


def test_the_command_makes_shows_and_revokes(path: Path) -> None:
    made = run(
        "create", "rollout-7", "--file", str(path), "--role", "producer", "--partition", "train*",
        "--partition", "val", "--field", "input_ids", "--expires", "30d", "--calls-per-s", "50",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    text = made.stdout.strip()
    assert split_token(text)
    assert text not in made.stderr
    assert "it is not shown again" in made.stderr
    found = TokenFile(path).find(text)
    assert found is not None
    fields = frozenset({"input_ids"})
    assert found.grants == tuple(Grant(p, ROLES["producer"], fields) for p in ("train*", "val"))
    assert found.limits == Limits(calls_per_s=50)

    bound = run(
        "bind", "judge", "--file", str(path), "--subject", "judge.example", "--partition", "*",
        "--verb", "read",
    )  # fmt: skip
    assert bound.exit_code == 0, bound.output
    shown = run("list", "--file", str(path)).stdout
    assert text.split("_", 2)[2] not in shown
    assert read_records(path).tokens[0].sha256 not in shown
    assert [line.split()[0] for line in shown.splitlines()] == ["ID", found.token_id, "certificate"]
    assert "producer in train* (input_ids)" in shown
    assert "calls_per_s 50" in shown

    assert found.token_id is not None
    assert run("revoke", found.token_id, "judge", "--file", str(path)).exit_code == 0
    assert read_records(path) == Records()
    nobody = run("revoke", text, "--file", str(path))
    assert isinstance(nobody.exception, InvalidRequest)
    assert text not in str(nobody.exception)


@pytest.mark.parametrize(
    "args",
    [
        ("create", "x", "--partition", "*"),
        ("create", "x", "--partition", "*", "--role", "root"),
        ("create", "x", "--partition", "*", "--role", "reader", "--expires", "soon"),
        ("create", "x", "--partition", "*", "--role", "reader", "--calls-per-s", "-1"),
        ("create", "", "--partition", "*", "--role", "reader"),
    ],
)
def test_a_command_that_is_wrong_changes_nothing(path: Path, args: tuple[str, ...]) -> None:
    result = run(*args, "--file", str(path))
    assert isinstance(result.exception, InvalidRequest)
    assert result.stdout == ""
    assert not path.exists()


@pytest.mark.parametrize("command", ["create", "bind", "list", "revoke"])
def test_each_command_says_what_it_does_and_takes_no_secret(command: str) -> None:
    shown = run(command, "--help").output
    assert "Example: dataplane token" in " ".join(shown.split())
    assert "--secret" not in shown
    assert "--token" not in shown


def test_an_expiry_is_a_span_or_a_date() -> None:
    assert expiry("never", NOW) is None
    assert expiry("30d", NOW) == NOW + 30 * 86400
    assert expiry("12h", NOW) == NOW + 12 * 3600
    assert expiry("2099-01-31", NOW) == datetime(2099, 1, 31, tzinfo=UTC).timestamp()
    for text in ("0s", "2001-01-01", "", "5", "d", "-5d", "999999999w", "30 d", "tomorrow"):
        with pytest.raises(InvalidRequest):
            expiry(text, NOW)
