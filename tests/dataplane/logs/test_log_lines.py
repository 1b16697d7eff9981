"""One event is one line, whoever chose its words, and holds no secret."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import KeyNotFound
from dataplane.logs.escaping import EVENT_CHARS, FACT_CHARS, TRACE_CHARS, Secrets, one_line
from dataplane.logs.lines import FACTS, JsonLines, TextLines, moment

PLACE = {"plane": "train", "plane_id": "9f0c6c1e6a7d4b21", "role": "tag_store"}
HOSTILE = "a\nlevel=error\r\x1b[31mred\x1b[0m\u202egnp.exe\u2028next\x00\x9b\udc80[red]"
TOKEN = "dpt_abcdefghijkl_AAECAwQFBgcICQoLDA0ODw"

Make = Callable[..., str]


def _line(form: str, event: str, *args: object, secret: bytes = b"", **facts: Any) -> str:
    exc_info = facts.pop("exc_info", None)
    secrets = Secrets()
    secrets.hide(secret)
    lines = (JsonLines if form == "json" else TextLines)(PLACE, secrets)
    logger = logging.Logger("dataplane.tags")
    record = logger.makeRecord(
        logger.name, logging.WARNING, "f.py", 1, event, args, exc_info, extra=facts
    )
    record.created = 1772446542.123456
    return lines.format(record)


@pytest.fixture(params=["json", "text"])
def line(request: pytest.FixtureRequest) -> Make:
    def make(*args: Any, **facts: Any) -> str:
        return _line(request.param, *args, **facts)

    return make


def _raised(error: BaseException) -> Any:
    try:
        raise error
    except BaseException:
        return sys.exc_info()


def test_a_line_of_json_has_stable_names() -> None:
    error = KeyNotFound("gone", partition_id="p", keys=["k"])
    text = _line("json", "no %s: %s", "row", error, partition="p", keys=3, client="c1", other=1)
    assert json.loads(text) == {
        "ts": "2026-03-02T10:15:42.123456Z",
        "level": "warning",
        "logger": "dataplane.tags",
        "event": "no row: gone",
        **PLACE,
        "pid": logging.LogRecord("", 0, "", 0, "", (), None).process,
        "partition": "p",
        "keys": 3,
        "client": "c1",
        "error": "KeyNotFound",
    }


def test_a_line_of_text_says_the_same() -> None:
    text = _line("text", "no row", partition="of two words", keys=3)
    assert text.startswith("2026-03-02T10:15:42.123456Z WARNING dataplane.tags [plane=train ")
    assert text.endswith('partition="of two words" keys=3] no row')


def test_facts_are_numbers_where_they_are_counts() -> None:
    facts = json.loads(_line("json", "e", bytes=5, rows=2, attempt=7))
    assert (facts["bytes"], facts["rows"], facts["attempt"]) == (5, 2, 7)


@given(st.text(), st.text())
def test_any_text_is_one_printable_line(event: str, fact: str) -> None:
    for form in ("json", "text"):
        text = _line(form, event.replace("%", "%%"), partition=fact)
        assert text.isprintable()
        assert len(text.splitlines()) == 1
        text.encode()


def test_hostile_text_moves_no_cursor_and_ends_no_line(line: Make) -> None:
    raised = _raised(OSError(HOSTILE))
    text = line("key %s", HOSTILE, partition=HOSTILE, client=HOSTILE, exc_info=raised)
    assert text.isprintable()
    assert "\\x1b[31m" in text
    assert "\\u202e" in text


def test_an_event_cannot_pass_for_a_fact() -> None:
    text = _line("text", "x] partition=other", partition='p" role=gateway')
    facts, event = text.split("] ", 1)
    assert event == "x] partition=other"
    assert facts.count("role=") == 2  # its own, and within the quotes of the other
    assert json.loads(facts.rpartition("partition=")[2]) == 'p" role=gateway'


def test_lines_are_bounded(line: Make) -> None:
    long = "x" * 1_000_000
    text = line(long, partition=long, client=long, exc_info=_raised(ValueError(long)))
    assert len(text) < 2 * (EVENT_CHARS + 2 * FACT_CHARS + 2 * TRACE_CHARS)
    assert one_line("a" * 10_000).startswith("aaaa")
    assert "characters" in one_line("a" * 10_000)


def test_a_traceback_stays_in_its_line(line: Make) -> None:
    text = line("failed", exc_info=_raised(ValueError("why\nnot")))
    assert len(text.splitlines()) == 1
    assert "Traceback" in text
    assert "ValueError: why" in text


def test_a_traceback_of_json_has_lines_of_its_own() -> None:
    told = json.loads(_line("json", "failed", exc_info=_raised(ValueError("\x1b[2J"))))
    first, *_, last = told["traceback"].splitlines()
    assert first.startswith("Traceback")
    assert last == "ValueError: \\x1b[2J"
    assert told["error"] == "ValueError"


@pytest.mark.parametrize("args", [("a",), (1, 2), ()])
def test_arguments_that_do_not_fit_lose_no_line(line: Make, args: tuple[Any, ...]) -> None:
    assert "rows" in line("%d rows", *args) or not args


def test_no_form_of_a_secret_is_in_a_line(line: Make) -> None:
    secret = bytes(range(200, 232))
    key = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIabc+/\n-----END EC PRIVATE KEY-----"
    forms = [
        repr(secret), secret.hex(), base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode(), TOKEN, f"Authorization: Bearer {TOKEN}", key,
        "authorization: bearer abcdefgh.ijk", key[:40],
    ]  # fmt: skip
    hidden = [
        secret.hex(), base64.b64encode(secret).decode().rstrip("="), str(secret)[2:40],
        TOKEN[-10:], "MHcCAQEE", "abcdefgh.ijk",
    ]  # fmt: skip
    for form in forms:
        text = line(
            "with %s", form, secret=secret, client=form, exc_info=_raised(RuntimeError(form))
        )
        for part in hidden:
            assert part not in text, (form, part)
    assert "dpt_abcdefghijkl_***" in line("with %s", TOKEN)


def test_every_fact_has_its_own_name() -> None:
    taken = set(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime"}
    assert not taken.intersection(FACTS)
    assert len(set(FACTS)) == len(FACTS)


def test_moments_are_in_utc() -> None:
    assert moment(0.0) == "1970-01-01T00:00:00.000000Z"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_stream_that_knows_ascii_only_is_no_trouble(encoding: str) -> None:
    code = r"""
import logging
from dataplane.logs.process import set_up
set_up("gateway", level="info", form="json")
logging.getLogger("dataplane.gateway").info("Schl\u00fcssel %s", "\udc80")
"""
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:backslashreplace"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True
    )
    told = json.loads(done.stderr.decode(encoding))
    assert (told["event"], told["role"]) == ("Schl\u00fcssel \\udc80", "gateway")


def test_what_nobody_caught_and_what_others_say_takes_the_same_form() -> None:
    code = r"""
import threading, warnings
from dataplane.logs.process import set_up
set_up("stores", level="warning", form="json", plane="p")
def fails(): raise ValueError("in a thread")
thread = threading.Thread(target=fails)
thread.start()
thread.join()
warnings.warn("two\nlines")
raise RuntimeError("the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    thread, warning, end = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert (thread["level"], thread["error"]) == ("error", "ValueError")
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert (end["level"], end["error"], end["plane"]) == ("critical", "RuntimeError", "p")
