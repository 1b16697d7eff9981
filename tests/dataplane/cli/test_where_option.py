"""`--where`: terms and JSON become the predicate that is meant, or are refused where they stop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import InvalidRequest
from dataplane.cli.where import parse_where
from dataplane.tags.where import parse_where as as_the_plane_reads_it


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("status=finished", {"status": "finished"}),
        ("status==finished", {"status": "finished"}),
        (" status = done , steps >= 5 ", {"status": "done", "steps": {">=": 5}}),
        ("seq_len<100,seq_len>=10", {"and": [{"seq_len": {"<": 100}}, {"seq_len": {">=": 10}}]}),
        ("score!=0.5", {"score": {"!=": 0.5}}),
        ("score>-1e3", {"score": {">": -1000.0}}),
        ("ok=true,not_ok=false,gone=null", {"ok": True, "not_ok": False, "gone": None}),
        ('session="7"', {"session": "7"}),
        ('msg="a, b=c"', {"msg": "a, b=c"}),
        ('"odd tag"=1', {"odd tag": 1}),
        ("session=007", {"session": "007"}),
        ("when=2027-01-31", {"when": "2027-01-31"}),
        ("path=/a/b c", {"path": "/a/b c"}),
        ("score", {"score": {"exists": True}}),
        ("!score", {"score": {"exists": False}}),
        ('uid in ["u1", "u2"]', {"uid": {"in": ["u1", "u2"]}}),
        ("uid in[1,2],n=4", {"uid": {"in": [1, 2]}, "n": 4}),
        ("dataplane.lost=true", {"dataplane.lost": True}),
        ("inside=1", {"inside": 1}),
        ('{"status": "x", "or": [{"a": 1}, {"b": {">": 2}}]}',
         {"status": "x", "or": [{"a": 1}, {"b": {">": 2}}]}),
        ("{}", {}),
    ],
)  # fmt: skip
def test_what_is_meant(text: str, meant: dict[str, Any]) -> None:
    found = parse_where([text])
    assert found == meant
    as_the_plane_reads_it(found)  # it takes it


def test_several_hold_together() -> None:
    assert parse_where(None) is None
    assert parse_where([]) is None
    assert parse_where(["a=1", "b=2"]) == {"a": 1, "b": 2}
    assert parse_where(["a=1", '{"a": {">": 0}}']) == {"and": [{"a": 1}, {"a": {">": 0}}]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at its end there should be the name of a tag"),
        ("status=", "at its end there should be a value"),
        ("status=a,", "at its end there should be the name of a tag"),
        ("=a", "before '=a' there should be the name of a tag"),
        ("a=[1,2]", "one value, no list"),
        ("uid in u1", "a list in brackets"),
        ('uid in "u1"', "a list in brackets"),
        ("a=1 b=2,c", None),
        ("a>", "a value"),
        ("a=1e999", "a number that fits"),
        ('a="open', "a string or list of JSON"),
        ("a in [1, NaN]", "a string or list of JSON"),
        ('a="x" b', "a comma, or the end"),
        ("and=1", "into a JSON object only"),
        ("__import__('os')", "a comma, or the end"),
        ("{", "no JSON object"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1, "a": 2}', "given twice"),
        ("{'a': 1}", "no JSON object"),
        ("[" * 100_000, "the name of a tag"),
        ("{" * 100_000, "no JSON object"),
    ],
)
def test_what_is_none(text: str, said: str | None) -> None:
    if said is None:
        assert parse_where([text]) == {"a": "1 b=2", "c": {"exists": True}}
        return
    with pytest.raises(InvalidRequest) as raised:
        parse_where([text])
    assert said in raised.value.message
    assert len(raised.value.message) < 300


@given(st.text(max_size=40))
def test_any_text_is_a_predicate_or_refused(text: str) -> None:
    try:
        found = parse_where([text])
    except InvalidRequest:
        return
    assert isinstance(found, dict)


@given(st.text(min_size=1, max_size=20), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20))
def test_quoted_names_and_values_come_through(tag: str, value: int | str) -> None:
    import json

    if tag in ("and", "or", "not"):
        return
    assert parse_where([f"{json.dumps(tag)}={json.dumps(value)}"]) == {tag: value}
