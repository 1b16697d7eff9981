"""Every error: its place in the documented tree, its journey over a wire, its message."""

from __future__ import annotations

import copy
import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import errors
from dataplane.errors import (
    ERRORS,
    DataplaneError,
    InternalError,
    RequestError,
    from_wire,
    quote,
    to_wire,
)

CLASSES = sorted(ERRORS.values(), key=lambda cls: cls.__name__)

SAMPLES: dict[str, Any] = {
    "partition_id": "train",
    "keys": ["u1_0_0", "k\n\x00", "\U0001f600"],
    "fields": ["labels"],
    "stores": ["s1"],
    "cleared_at": 881,
    "attempt": 880,
    "task": "train",
    "used_bytes": 1 << 40,
    "limit_bytes": 1 << 41,
    "oldest_keys": ["u0"],
    "lagging_task": "reference",
    "retry_after_s": 0.25,
    "limit": "calls",
    "waited_s": 1.5,
    "explanation": "B 3 of 4",
    "request_id": "c1:7",
    "path": "saved/step-7",
    "file": "0-tags.parquet",
    "offset": 4711,
}


def full(cls: type[DataplaneError]) -> DataplaneError:
    return cls("what, which, what to do", **{name: SAMPLES[name] for name in cls.attributes})


def documented() -> dict[str, tuple[str | None, list[str], list[str]]]:
    """Class: its parent, its standard base, its attributes, as the docstring draws them."""
    found: dict[str, tuple[str | None, list[str], list[str]]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4,})([A-Z]\w+)(?: \((\w+)\))?(.*)$", line)
        if match is None:
            continue
        indent, name, base, rest = match.groups()
        while above and above[-1][0] >= len(indent):
            above.pop()
        parent = above[-1][1] if above else None
        above.append((len(indent), name))
        attributes = re.findall(r"(?<= )\.(\w+)", rest)
        found[name] = (parent, [base] if base else [], attributes)
    return found


def test_the_docstring_is_the_tree() -> None:
    drawn = documented()
    assert set(drawn) == set(ERRORS)
    for name, (parent, bases, attributes) in drawn.items():
        cls = ERRORS[name]
        ours = [base.__name__ for base in cls.__bases__ if issubclass(base, DataplaneError)]
        theirs = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"]
        assert ours == ([parent] if parent else [])
        assert theirs == bases
        assert list(cls.attributes) == attributes


@pytest.mark.parametrize(
    ("cls", "standard"),
    [
        (errors.InvalidRequest, ValueError),
        (errors.PartitionNotFound, KeyError),
        (errors.KeyNotFound, KeyError),
        (errors.FieldNotFound, KeyError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.Unreachable, ConnectionError),
        (errors.QuotaExceeded, RuntimeError),
        (errors.StaleWrite, RuntimeError),
    ],
)
def test_whoever_catches_the_standard_class_catches_ours(
    cls: type[DataplaneError], standard: type[Exception]
) -> None:
    with pytest.raises(standard) as caught:
        raise full(cls)
    assert type(caught.value) is cls


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_says_what_it_means(cls: type[DataplaneError]) -> None:
    assert cls.__doc__
    assert "__doc__" in vars(cls)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "carry",
    [
        lambda error: from_wire(msgpack.unpackb(msgpack.packb(to_wire(error)))),
        copy.copy,
        copy.deepcopy,
    ],
    ids=["wire", "copy", "deepcopy"],
)
def test_class_message_and_attributes_survive(cls: type[DataplaneError], carry: Any) -> None:
    for error in (full(cls), cls("bare"), cls()):
        arrived = carry(error)
        assert type(arrived) is cls
        assert arrived is not error
        assert arrived.message == error.message == str(arrived)
        assert arrived.args == error.args
        for name in cls.attributes:
            assert getattr(arrived, name) == getattr(error, name)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_text_is_the_sentence_and_not_its_repr(cls: type[DataplaneError]) -> None:
    assert str(cls("partition 'a' has no key 'b'")) == "partition 'a' has no key 'b'"
    assert str(cls()) == ""


@pytest.mark.parametrize("cls", CLASSES)
def test_an_attribute_that_was_not_given_is_none_and_an_unknown_one_is_a_bug(
    cls: type[DataplaneError],
) -> None:
    error = cls("x")
    assert all(getattr(error, name) is None for name in cls.attributes)
    with pytest.raises(TypeError, match=f"{cls.__name__} has no attribute \\['nope'\\]"):
        cls("x", nope=1)


def test_request_errors_are_those_the_caller_can_fix() -> None:
    fixable = {name for name, cls in ERRORS.items() if issubclass(cls, RequestError)}
    others = (
        "DataplaneError QuotaExceeded RateLimited DeadlineExceeded Unreachable PlaneLost "
        "OutcomeUnknown"
    )
    assert set(ERRORS) - fixable == {
        *others.split(), "ValueLost", "CheckpointDamaged", "JournalDamaged", "InternalError",
    }  # fmt: skip


@pytest.mark.parametrize(
    "wire",
    [
        {"type": "FromTheFuture", "message": "hello", "keys": ["k"]},
        {"type": "KeyError", "message": "hello"},
        {"type": None, "message": "hello"},
        {"type": ["KeyNotFound"], "message": "hello"},
        {"message": "hello"},
    ],
)
def test_a_class_this_version_does_not_know_is_an_internal_error(wire: dict[str, Any]) -> None:
    arrived = from_wire(wire)
    assert type(arrived) is InternalError
    assert arrived.message == f"{wire.get('type')}: hello"


def test_an_older_peer_may_leave_attributes_out_and_a_newer_one_add_some() -> None:
    arrived = from_wire({"type": "KeyNotFound", "message": "m", "keys": ["a"], "added_later": 1})
    assert isinstance(arrived, errors.KeyNotFound)
    assert arrived.keys == ["a"]
    assert arrived.partition_id is None
    assert not hasattr(arrived, "added_later")


def test_quote_shows_some_and_counts_the_rest() -> None:
    assert quote([]) == ""
    assert quote(["a"]) == "'a'"
    assert quote(["a", "b"], limit=2) == "'a', 'b'"
    assert quote(["a", "b", "c", "d"], limit=2) == "'a', 'b' and 2 more"
    assert quote(f"k{i}" for i in range(1000)).endswith("'k4' and 995 more")
    assert quote([3, None, b"x"]) == "3, None, b'x'"


@given(st.lists(st.text() | st.binary() | st.text(min_size=100), max_size=9))
def test_quote_is_one_short_line_whatever_the_names(names: list[Any]) -> None:
    text = quote(names)
    assert len(text) <= 5 * 82 + 20
    assert "\n" not in text
    assert text.isprintable()
