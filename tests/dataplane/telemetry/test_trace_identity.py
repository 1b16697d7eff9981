"""The trace of a group is the same everywhere, and of one group; a sample is a share of all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.telemetry.groups import MAX_KEYS, Group, Known, uids_in
from dataplane.telemetry.identity import followed


def test_every_process_comes_to_the_same_ids() -> None:
    code = (
        "from dataplane.telemetry.identity import followed; "
        "print(*followed('p', 'train', 'u\\udc80'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert tuple(map(int, done.stdout.split())) == followed("p", "train", "u\udc80")


@given(st.text(), st.text(), st.text())
def test_ids_are_those_of_the_standard(plane_id: str, partition_id: str, uid: str) -> None:
    of = followed(plane_id, partition_id, uid)
    assert 0 < of.trace_id < 2**128
    assert 0 < of.root_id < 2**64
    assert of.within(1.0)
    assert not of.within(0.0)


def test_no_two_groups_share_a_trace() -> None:
    names = [("p", "ab", "c"), ("p", "a", "bc"), ("pa", "b", "c"), ("p", "ab", "d")]
    assert len({followed(*name).trace_id for name in names}) == len(names)


@pytest.mark.parametrize("sample", [0.01, 0.25, 0.9])
def test_a_sample_is_a_share_and_a_smaller_one_is_part_of_it(sample: float) -> None:
    groups = [followed("p", "train", f"u{i}") for i in range(20_000)]
    taken = {of for of in groups if of.within(sample)}
    assert abs(len(taken) / len(groups) - sample) < 0.02
    assert {of for of in groups if of.within(sample / 2)} <= taken


def test_uids_come_from_tags_and_never_from_keys() -> None:
    known = Known()
    put = known.of_put("p", ["u_0_0"], [{"uid": "g"}], None, must_exist=False)
    assert put == [Group("g")]
    assert known.of_keys("p", ["u_0_0", "u_0_1"]) == [Group("g"), Group("u_0_1")]
    assert known.of_keys("other", ["u_0_0"]) == [Group("u_0_0")]
    back = known.of_put("p", ["u_0_0"], [], None, must_exist=True)
    assert back == [Group("g")]
    known.began(7, "p", "h")
    assert known.of_put("p", ["x"], [{}], 7, must_exist=False) == [Group("h")]


def test_a_group_begins_once() -> None:
    known = Known()
    tags = [{"uid": "g", "is_prompt": True}]
    assert known.of_put("p", ["g"], tags, None, must_exist=False) == [Group("g", begins=True)]
    assert known.of_put("p", ["g"], tags, None, must_exist=False) == [Group("g")]


def test_what_is_remembered_is_bounded() -> None:
    known = Known()
    known.learn("p", (f"k{i}" for i in range(MAX_KEYS + 10)), ("g" for _ in range(MAX_KEYS + 10)))
    assert known.of_keys("p", ["k5"]) == [Group("k5")]
    assert known.of_keys("p", [f"k{MAX_KEYS}"]) == [Group("g")]


def test_a_predicate_names_uids_or_does_not() -> None:
    assert uids_in({"uid": "a"}) == ["a"]
    assert uids_in({"uid": {"in": ["a", "b"]}}) == ["a", "b"]
    assert uids_in({"uid": {"=": "a"}}) == ["a"]
    assert uids_in({"uid": {">": 1}}) == uids_in({}) == uids_in(None) == []
