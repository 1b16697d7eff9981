"""Who may do what: patterns, verbs, fields, and refusals that say nothing of what there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest, PermissionDenied
from dataplane.gateway.access.binding import check_binding, is_local
from dataplane.gateway.access.limits import Limits
from dataplane.gateway.access.roles import (
    ANYONE,
    METHODS,
    OWN,
    ROLES,
    VERBS,
    Grant,
    Principal,
    verbs_of,
)
from dataplane.v1 import dataplane_pb2 as pb

RPCS = {method.name for method in pb.DESCRIPTOR.services_by_name["DataPlaneService"].methods}


def principal(*grants: Grant) -> Principal:
    return Principal("rollout-7", grants, Limits())


def grant(partition: str, verbs: str, fields: str | None = None) -> Grant:
    return Grant(
        partition, frozenset(verbs.split()), None if fields is None else frozenset(fields.split())
    )


def test_every_call_of_the_protocol_has_a_verb() -> None:
    assert set(METHODS) == RPCS
    assert set(METHODS.values()) <= VERBS | {OWN}
    assert set(METHODS.values()) >= VERBS


def test_roles_are_bundles_of_verbs_and_each_verb_is_in_one() -> None:
    assert all(verbs <= VERBS for verbs in ROLES.values())
    assert ROLES["admin"] == VERBS
    assert ROLES["reader"] == {"read", "list", "wait", "explain"}
    assert ROLES["consumer"] == ROLES["reader"] | {"claim"}
    assert ROLES["producer"] == ROLES["consumer"] | {"put", "put_tags", "group"}
    assert verbs_of(["reader"], ["clear"]) == ROLES["reader"] | {"clear"}
    with pytest.raises(InvalidRequest, match="there is no role 'writer'; roles are producer"):
        verbs_of(["writer"])


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("train", ["train"], ["train2", "xtrain", "", "Train"]),
        ("train*", ["train", "train@3"], ["trai", "xtrain"]),
        ("*", ["", "anything", "a\nb"], []),
        ("*.eval", [".eval", "x.eval"], ["x.evals", "eval"]),
        ("a*b", ["ab", "axb", "a*b"], ["a", "b", "ba", "abx"]),
        ("ab*ba", ["abba", "abxba"], ["aba"]),
        ("a*b*c", ["abc", "axbxc", "abbc"], ["acb", "ab", "ac"]),
        ("a**c", ["ac", "abc"], ["a"]),
        ("t?ain", ["t?ain"], ["train"]),
        ("[ab]", ["[ab]"], ["a"]),
    ],
)
def test_only_a_star_stands_for_anything(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    which = grant(pattern, "put")
    assert [name for name in fitting + others if which.covers(name)] == fitting


@given(st.text("ab*", min_size=1, max_size=8), st.text("ab", max_size=10))
def test_patterns_fit_what_a_regular_expression_would(pattern: str, name: str) -> None:
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    assert grant(pattern, "put").covers(name) == bool(re.fullmatch(expression, name))


def test_a_hostile_name_is_no_work() -> None:
    # As a backtracking expression this takes longer than the universe has been there.
    pattern = "a*" * 100 + "b"
    assert not grant(pattern, "put").covers("a" * 100_000)


def test_verbs_hold_in_their_partitions_only() -> None:
    who = principal(grant("train*", "put list"), grant("prompts", "read"))
    assert who.may("put", "train@1")
    assert not who.may("put", "prompts")
    assert who.may("read", "prompts")
    assert not who.may("read", "train")
    assert not who.may("clear", "train")
    assert [name for name in ("train", "prompts", "val") if who.sees(name)] == ["train", "prompts"]
    assert who.has("read")
    assert not who.has("clear")
    assert who.has(OWN)
    who.require_any("read")
    with pytest.raises(PermissionDenied, match="'rollout-7' may not clear in any partition"):
        who.require_any("clear")


def test_fields_are_allowed_by_name_and_grants_add_up() -> None:
    who = principal(
        grant("train", "put read", "input_ids labels"),
        grant("t*", "put", "logprobs"),
        grant("open", "put"),
        grant("o*", "put", "labels"),
    )
    assert who.may("put", "train", ["input_ids", "logprobs"])
    assert not who.may("put", "train", ["input_ids", "rm_scores"])
    assert not who.may("read", "train", ["logprobs"])
    assert who.may("put", "train")
    assert who.may("put", "open", ["whatever"])
    assert who.fields("put", "train") == {"input_ids", "labels", "logprobs"}
    assert who.fields("put", "open") is None
    assert who.fields("put", "val") == frozenset()
    with pytest.raises(PermissionDenied) as told:
        who.require("put", "train", ["labels", "rm_scores", "values"])
    assert "with fields 'rm_scores', 'values'" in told.value.message
    who.require("put", "train", ["labels"])


def test_a_refusal_depends_on_the_request_alone() -> None:
    who = principal(grant("train", "put", "labels"))
    told: list[str] = []
    for name in ("secret", "absent"):
        with pytest.raises(PermissionDenied) as refused:
            who.require("read", name, ["labels"])
        told.append(refused.value.message.replace(repr(name), "…"))
    assert (
        told[0] == told[1] == "'rollout-7' may not read in partition …; it needs a grant for that"
    )


def test_anyone_may_everything() -> None:
    for verb in VERBS:
        ANYONE.require(verb, "any", ["x"])
    assert ANYONE.sees("")
    assert ANYONE.token_id is None


@pytest.mark.parametrize(("partition", "verbs"), [("", {"put"}), ("x", set()), ("x", {"write"})])
def test_a_grant_that_grants_nothing_is_refused(partition: str, verbs: set[str]) -> None:
    with pytest.raises(InvalidRequest):
        Grant(partition, frozenset(verbs))


LOCAL = [
    "127.0.0.1:50051", "127.8.9.10:1", "[::1]:50051", "::1", "localhost:0", "LOCALHOST:5",
    "unix:/run/gateway.sock", "unix:///run/x", "unix-abstract:x", "ipv4:127.0.0.1:5",
    "ipv6:[::1]:5", "dns:localhost:5", "[::ffff:127.0.0.1]:5",
]  # fmt: skip
REMOTE = [
    "0.0.0.0:50051", "[::]:50051", ":50051", "10.0.0.1:5", "example.org:5",
    "localhost.example.org:5", "[2001:db8::1]:5", "dns:///localhost:5", "vsock:3:5", "*:5", "",
    "127.0.0.1.example.org:5", "[::ffff:10.0.0.1]:5", "dns:0.0.0.0:5",
]  # fmt: skip


@pytest.mark.parametrize("listen", LOCAL)
def test_this_machine_needs_no_credentials(listen: str) -> None:
    assert is_local(listen)
    check_binding(listen, has_credentials=False, insecure_allow_anyone=False)
    check_binding(listen, has_credentials=True, insecure_allow_anyone=False, has_tls=False)


@pytest.mark.parametrize("listen", REMOTE)
def test_elsewhere_the_risk_is_taken_by_name(listen: str) -> None:
    assert not is_local(listen)
    with pytest.raises(InvalidRequest) as told:
        check_binding(listen, has_credentials=False, insecure_allow_anyone=False)
    assert "--insecure-allow-anyone" in told.value.message
    assert "everybody who can reach this address" in told.value.message
    check_binding(listen, has_credentials=False, insecure_allow_anyone=True)
    check_binding(listen, has_credentials=True, insecure_allow_anyone=False)
    with pytest.raises(InvalidRequest, match="without TLS would show every token") as told:
        check_binding(listen, has_credentials=True, insecure_allow_anyone=False, has_tls=False)
    assert "--insecure-allow-plain-text" in told.value.message
    check_binding(
        listen, has_credentials=True, insecure_allow_anyone=False, has_tls=False,
        insecure_allow_plain_text=True,
    )  # fmt: skip
