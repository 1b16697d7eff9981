"""Tool calls in what a policy wrote: both forms, and anything else without an exception."""

from __future__ import annotations

import json
import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.tools.parse import (
    CLOSE,
    MAX_CALL_CHARS,
    OPEN,
    MalformedCall,
    Parsed,
    ToolCall,
    from_message,
    parse_calls,
)

ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


def tagged(*bodies: object) -> str:
    return "".join(
        f"{OPEN}\n{body if isinstance(body, str) else json.dumps(body)}\n{CLOSE}" for body in bodies
    )


def test_a_hermes_call_stands_anywhere_in_the_text() -> None:
    assert parse_calls(f"Let me see. {tagged(ADD)} Done.") == Parsed(
        "Let me see.  Done.", (ToolCall("add", {"a": 1, "b": 2}),)
    )


def test_several_calls_keep_their_order() -> None:
    text = tagged(ADD, {"name": "now"}, {"name": "say", "arguments": '{"x": "é"}'})
    assert parse_calls(text).calls == (
        ToolCall("add", {"a": 1, "b": 2}), ToolCall("now", {}), ToolCall("say", {"x": "é"}),
    )  # fmt: skip


def test_a_closing_tag_within_a_string_belongs_to_the_string() -> None:
    call = {"name": "say", "arguments": {"x": f"{CLOSE}{OPEN}"}}
    assert parse_calls(tagged(call, ADD)).calls == (
        ToolCall("say", {"x": f"{CLOSE}{OPEN}"}), ToolCall("add", {"a": 1, "b": 2}),
    )  # fmt: skip


def test_the_last_closing_tag_may_be_missing() -> None:
    """Servers leave out the stop string that ended a turn."""
    assert parse_calls(f"{OPEN}{json.dumps(ADD)}\n").calls == (ToolCall("add", {"a": 1, "b": 2}),)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{not json", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", "a call is a JSON object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": ""}', "no name"),
        ('{"name": 3}', "no name"),
        ('{"name": "add", "arguments": [1]}', "arguments are not an object"),
        ('{"name": "add", "arguments": "[1]"}', "arguments are not an object"),
        ('{"name": "add", "arguments": "{"}', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "Unicode"),
        ('{"name": "\\ud800"}', "Unicode"),
        ('{"name": "add"} {"name": "add"}', "more than one"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}", "deeper"),
        ('{"name": "add", "arguments": ' + '{"a":' * 60_000, "JSON|deeper|longer"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "JSON"),
        ('{"name": "' + "x" * MAX_CALL_CHARS + '"}', "JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_next_is_read(body: str, reason: str) -> None:
    first, second = parse_calls(tagged(body, ADD)).calls
    assert isinstance(first, MalformedCall)
    assert re.search(reason, first.reason), first.reason
    assert second == ToolCall("add", {"a": 1, "b": 2})


def test_an_unclosed_call_is_malformed() -> None:
    (call,) = parse_calls(f'{OPEN}{{"name": "add"').calls
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.reason


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ADD),
        json.dumps([ADD]),
        json.dumps({"type": "function", "function": ADD}),
        json.dumps({"role": "assistant", "content": None, "tool_calls": [{"function": ADD}]}),
        json.dumps({"name": "add", "parameters": {"a": 1, "b": 2}}),
        "\n " + json.dumps({"name": "add", "arguments": '{"a": 1, "b": 2}'}) + "\n",
    ],
)
def test_openai_s_form_is_the_whole_text(text: str) -> None:
    assert parse_calls(text) == Parsed("", (ToolCall("add", {"a": 1, "b": 2}),))
    assert parse_calls(text, form="hermes") == Parsed(text, ())


@pytest.mark.parametrize(
    "text",
    ["42", "", "{", "[]", "{}", '{"answer": 42}', "[1, 2]", f"so: {json.dumps(ADD)}",
     '{"name": "Ada"}', json.dumps([ADD, 3]), json.dumps(ADD) + " there"],
)  # fmt: skip
def test_an_answer_may_be_json_and_is_no_call(text: str) -> None:
    assert parse_calls(text) == Parsed(text, ())


def test_the_forms_can_be_fixed() -> None:
    assert parse_calls(tagged(ADD), form="openai") == Parsed(tagged(ADD), ())
    assert len(parse_calls(tagged(ADD), form="hermes").calls) == 1


@pytest.mark.parametrize(
    "text", [tagged(*[ADD] * 5), json.dumps([ADD] * 5)], ids=["hermes", "openai"]
)
def test_calls_of_a_turn_are_bounded(text: str) -> None:
    *calls, last = parse_calls(text, max_calls=3).calls
    assert calls == [ToolCall("add", {"a": 1, "b": 2})] * 3
    assert isinstance(last, MalformedCall)
    assert "only the first 3 calls" in last.reason


def test_calls_that_a_server_parsed_keep_their_ids() -> None:
    entry = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert from_message([entry, 3]) == (
        ToolCall("add", {}, "call_7"),
        MalformedCall("a call is a JSON object with name and arguments"),
    )
    assert isinstance(from_message("no list")[0], MalformedCall)
    assert len(from_message([entry] * 40, max_calls=2)) == 3


PIECES = st.sampled_from(
    [OPEN, CLOSE, '{"name": "f"', ', "arguments": {', "}", '"', "\\", "[", "]", "NaN", "\\ud800",
     '"name"', ":", "1e999", " ", "\n", "null", '{"function": {"name": "g"}}', '"tool_calls": [']
)  # fmt: skip


@given(
    st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join),
    st.sampled_from(["any", "hermes", "openai"]),
)
def test_whatever_is_written_is_read_without_an_exception(text: str, form: Any) -> None:
    """And what is read is bounded, and can be stored."""
    parsed = parse_calls(text, form=form, max_calls=4)
    assert len(parsed.calls) <= 5
    assert len(parsed.content) <= len(text)
    if not parsed.calls:
        assert parsed.content == text
    for call in parsed.calls:
        if isinstance(call, ToolCall):
            assert call.name
            msgpack.packb(json.dumps(call.arguments, ensure_ascii=False))
        else:
            assert call.reason


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=4)


@given(st.lists(ARGUMENTS, min_size=1, max_size=4), st.booleans())
def test_calls_come_back_as_they_were_written(calls: list[dict[str, Any]], in_string: bool) -> None:
    """Whatever the arguments are, tags within their strings included."""
    bodies = [
        {"name": "f", "arguments": json.dumps(given_) if in_string else given_} for given_ in calls
    ]
    expected = tuple(ToolCall("f", given_) for given_ in calls)
    assert parse_calls(tagged(*bodies)).calls == expected
    assert parse_calls(json.dumps(bodies), form="openai").calls == expected


@given(st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from(["function", "name", "arguments", "id"]), x), max_leaves=10))  # fmt: skip
def test_whatever_a_server_says_are_tool_calls_is_read(value: Any) -> None:
    for call in from_message(value):
        assert isinstance(call, (ToolCall, MalformedCall))
