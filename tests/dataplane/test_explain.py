"""Explanations bare: what is counted, who is named, and that no answer takes long or is long."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.tags.claims.leases import Granted, Lease
from dataplane.tags.explain.clients import Clients
from dataplane.tags.explain.explain import MAX_NAMES, MAX_TEXT, Surroundings, explain
from dataplane.tags.explain.foremost import Foremost
from dataplane.tags.explain.headcount import MAX_FAILING, STEP
from dataplane.tags.explain.holdups import SHOWN
from dataplane.tags.explain.question import FIRST_ROWS, Allowance, Question
from dataplane.tags.explain.requirements import requirements
from dataplane.tags.explain.wording import MAX_CHARS, size
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.puts import PutRows
from dataplane.tags.query import compile_where
from dataplane.tags.rows import CHUNK_ROWS
from dataplane.tags.store import TagStore
from dataplane.tags.views.views import condition_of
from dataplane.types import Explanation, Quota
from tests.dataplane.audit import Blocks, put, rows_of

P = "train"
LABELS = {"c1": "pid 11 on here", "c2": "pid 22 on there"}


def question(
    partition_id: str | None = P,
    where: Any = None,
    fields: Sequence[str] = (),
    *,
    grouped: bool = False,
    task: str | None = None,
    wanted: int | None = None,
) -> Question:
    return Question(partition_id, compile_where(where), frozenset(fields), grouped, task, wanted)


def told(
    store: TagStore,
    asked: Question,
    *,
    now: float = 100.0,
    attached: Sequence[str] = ("c1",),
    labels: Mapping[str, str] = LABELS,
    waiting: Mapping[str, int] | None = None,
    allowance: Allowance | None = None,
    between: Callable[[], None] | None = None,
) -> Explanation:
    """The answer; `between` is called between its steps."""
    around = Surroundings(Clients(attached, labels), lambda p: (waiting or {}).get(p, 0), now)
    steps = explain(store, asked, around, allowance or Allowance())
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        if between is not None:
            between()


def begin(store: TagStore, uid: str, n: int = 4, *, by: str = "c1", now: float = 0.0) -> Group:
    """Begin a group, as the server does."""
    if P not in store.partitions:
        put(store, P, ["first"], tags=[{}])  # a group's producer has its account in the partition
        store.apply_clear(P, ["first"], 0.0)
    attempt = store.n + 1
    tags = {"is_prompt": True, "status": "running", "uid": uid, "n": n, "attempt": attempt}
    prompt = PutRows(
        P, [uid], [dict(tags)], [len(msgpack.packb(tags))], None, client_id=by, is_prompt=True
    )
    found = store.check_put(prompt)
    group = Group(uid, P, attempt, n, 0, store.partition(P).producer(by), at=now)
    store.apply_begin(prompt, found, group, now)
    return group


def session(store: TagStore, group: Group, number: int, *, block: Any = None, **tags: Any) -> None:
    """One trajectory of a group."""
    tags = {"session_id": number, "status": "completed", **tags}
    put(store, P, [f"{group.uid}_{number}_0"], block, [tags], group=group)


def end(store: TagStore, group: Group, status: str = "finished", now: float = 0.0) -> None:
    change = {"status": status}
    prompt = PutRows(P, [group.uid], [dict(change)], [len(msgpack.packb(change))], None)
    store.apply_end(group, status, (prompt, store.check_put(prompt)), now, "c1")


def hold(store: TagStore, task: str, keys: Sequence[str], client_id: str, at: float) -> Lease:
    """Claim rows, as a grant does."""
    partition = store.partition(P)
    positions = [p for key in keys if (p := partition.index.get(key)) is not None]
    rows = [row for key in keys if (row := partition.row(key)) is not None]
    claim_id = positions[0] + 1
    granted = Granted(claim_id, rows, positions, [1] * len(rows), partition.revision)
    lease = Lease(granted, 30.0, grouped=False, at=at)
    partition.claims.task(task).hold(lease, client_id, claim_id, None)
    return lease


# -- requirements ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        (None, []),
        ({}, []),
        ({"status": "finished"}, ["status = 'finished'"]),
        ({"status": "finished", "step": {">=": 5}}, ["status = 'finished'", "step >= 5"]),
        ({"n": {">": 1, "<=": 3}}, ["n <= 3", "n > 1"]),
        ({"uid": {"in": ["b", "a"]}}, ["uid in ['a', 'b']"]),
        ({"n": {"in": list(range(9))}}, ["n in [0, 1, 2, 3, 4, and 4 more]"]),
        ({"n": [1, [True, None]]}, ["n = [1, [True, None]]"]),
        ({"a": {"!=": 1}}, ["a != 1"]),
        ({"a": {"exists": True}}, ["a exists"]),
        ({"a": {"exists": False}}, ["a is absent"]),
        ({"or": [{"a": 1}, {"b": 2, "c": 3}]}, ["a = 1 or (b = 2 and c = 3)"]),
        ({"not": {"a": 1, "b": 2}}, ["not (a = 1 and b = 2)"]),
        ({"and": [{"a": 1}, {"and": [{"b": 2}]}]}, ["a = 1", "b = 2"]),
        ({"two words": 1, "x\ny": 2}, ["'two words' = 1", "'x\\ny' = 2"]),
        ({"a": {"in": []}}, ["nothing (it holds for no row)"]),
        ({"a": "x" * 1000}, [f"a = '{'x' * 76}..."]),
        ({"or": [{"a": i} for i in range(7)]}, [
            "a = 0 or a = 1 or a = 2 or a = 3 or a = 4 or 2 more"
        ]),
    ],
)  # fmt: skip
def test_a_where_is_taken_apart_into_words(where: Any, texts: list[str]) -> None:
    assert sorted(r.text for r in requirements(compile_where(where))) == sorted(texts)


def test_requirements_that_look_alike_when_cut_stay_two() -> None:
    same = "x" * 200
    where = {"and": [{"a": same + "1"}, {"a": same + "2"}]}
    texts = [r.text for r in requirements(compile_where(where))]
    assert len(set(texts)) == 2


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from(["a", "b"]))
TAGS = st.dictionaries(st.sampled_from(["a", "b", "status", "is_prompt"]), SCALARS)
ENTRIES = st.one_of(
    st.tuples(st.sampled_from(["a", "b", "status", "is_prompt"]), SCALARS),
    st.tuples(
        st.sampled_from(["a", "b", "status"]),
        st.one_of(
            st.fixed_dictionaries({"<": st.integers(-2, 2)}),
            st.fixed_dictionaries({"!=": SCALARS}),
            st.fixed_dictionaries({"exists": st.booleans()}),
            st.fixed_dictionaries({"in": st.lists(SCALARS, max_size=3)}),
        ),
    ),
)
FLAT = st.lists(ENTRIES, max_size=3).map(dict)
WHERES = st.recursive(
    FLAT,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"and": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"or": parts}),
        inner.map(lambda part: {"not": part}),
    ),
    max_leaves=5,
)


@given(WHERES, TAGS)
def test_a_where_holds_just_if_all_that_it_requires_does(where: Any, tags: Any) -> None:
    predicate = compile_where(where)
    parts = requirements(predicate)
    assert predicate(tags) == all(part.match(tags) for part in parts)
    assert all(0 < len(part.text) <= MAX_CHARS + 8 for part in parts)


# -- counting rows ---------------------------------------------------------------------------


def forty_rows() -> TagStore:
    """37 rows that are not finished, and 3 that are, of which one has a score."""
    store, blocks = TagStore(1), Blocks()
    put(store, P, [f"k{i}" for i in range(37)], tags=[{"status": "pending"}] * 37, client_id="c1")
    put(store, P, ["f1", "f2", "f3"], blocks.block(3, {"x": [1, 1, 1]}),
        [{"status": "finished"}] * 3, client_id="c2")  # fmt: skip
    put(store, P, ["f1"], blocks.block(1, {"s": []}), client_id="c2")
    return store


def test_it_says_how_many_match_what_fails_and_how_often() -> None:
    answer = told(forty_rows(), question(where={"status": "finished"}, fields=["x", "s"], wanted=8))
    lines = answer.text.splitlines()
    assert lines[0] == "partition 'train': 1 of 40 rows match; 8 wanted"
    assert "  status = 'finished': 37 of 40 rows fail" in lines
    assert "  field 's' is missing on 2 rows that match otherwise" in lines
    assert answer.failing == {"status = 'finished'": 37, "field 's'": 2}
    assert (answer.matching, answer.total) == (1, 40)
    assert str(answer) == answer.text


def test_fields_alone_are_missing_on_all_rows_without_them() -> None:
    answer = told(forty_rows(), question(fields=["s"]))
    assert "  field 's' is missing on 39 rows\n" in answer.text
    assert answer.failing == {"field 's'": 39}


def test_of_one_row_it_speaks_in_the_singular() -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"], tags=[{"n": 1}, {"n": 2}])
    text = told(store, question(where={"n": 1})).text
    assert "  n = 1: 1 of 2 rows fails\n" in text
    assert "partition 'train' holds 0 bytes of extents and 8 bytes of tags in 2 rows" in text
    put(store, P, ["c"], Blocks().block(1, {"x": [1]}))
    assert "field 'x' is missing on 2 rows\n" in told(store, question(fields=["x"])).text
    store.apply_clear(P, ["b"], 0.0)
    assert "field 'x' is missing on 1 row\n" in told(store, question(fields=["x"])).text


def test_what_fails_most_comes_first_and_the_rest_is_a_number() -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"], tags=[{"t0": 0}, {}])
    where = {f"t{i}": 0 for i in range(MAX_FAILING + 3)}
    answer = told(store, question(where=where))
    assert len(answer.failing) == MAX_FAILING
    assert set(answer.failing.values()) == {2}
    assert "  and 3 conditions more, each for fewer rows\n" in answer.text
    assert list(told(store, question(where={"t0": 0, "t1": 0})).failing.values()) == [2, 1]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(TAGS, st.sets(st.sampled_from(["x", "s", "m"]))), min_size=1, max_size=12),
    WHERES,
    st.sets(st.sampled_from(["x", "s"])),
)
def test_the_counts_are_those_of_a_recount(
    rows: list[tuple[Any, set[str]]], where: Any, fields: set[str]
) -> None:
    store, blocks = TagStore(1), Blocks()
    lengths = {"x": [1], "s": [], "m": [1]}
    for i, (tags, have) in enumerate(rows):
        block = blocks.block(1, {name: lengths[name] for name in sorted(have)}) if have else None
        put(store, P, [str(i)], block, [tags])
    predicate = compile_where(where)
    answer = told(store, question(where=where, fields=sorted(fields)))
    assert answer.total == len(rows)
    assert answer.matching == sum(predicate(t) and fields <= have for t, have in rows)
    expected = {
        part.text: sum(not part.match(tags) for tags, _ in rows) for part in requirements(predicate)
    }
    for name in fields:
        expected[f"field '{name}'"] = sum(predicate(t) and name not in h for t, h in rows)
    assert answer.failing == {what: count for what, count in expected.items() if count}


def test_a_sealed_partition_is_said_to_be() -> None:
    store = forty_rows()
    assert "sealed" not in told(store, question()).text
    store.apply_seal(store.partition(P), 0.0)
    first = told(store, question()).text.splitlines()[0]
    assert first == "partition 'train': 40 of 40 rows match; it is sealed and takes no new row"


# -- groups ----------------------------------------------------------------------------------


def two_prompts() -> tuple[TagStore, Group, Group]:
    """Prompts A and B with four sessions each, of which B's last yields nothing."""
    store = TagStore(1)
    a, b = begin(store, "A", now=80.0), begin(store, "B", by="c2", now=87.7)
    for number in range(4):
        session(store, a, number)
    for number in range(3):
        session(store, b, number)
    end(store, a, now=95.0)
    return store, a, b


def test_a_strict_wait_for_two_groups_is_told_that_b_has_3_of_4() -> None:
    store, _, _ = two_prompts()
    answer = told(store, question(where={"status": "completed"}, grouped=True, wanted=2))
    assert answer.text.splitlines()[:3] == [
        "partition 'train': 1 of 2 groups are whole and match; 2 wanted",
        "held up by, oldest first:",
        "  'B': running for 12.3 s, 3 of 4 sessions, producer pid 22 on there (client c2): dead",
    ]
    assert (answer.matching, answer.total, answer.failing) == (1, 2, {})
    assert answer.stuck == [{
        "key": "B", "status": "running", "age_s": 12.3, "producer": "pid 22 on there",
        "client_id": "c2", "alive": False, "sessions": 3, "n": 4,
    }]  # fmt: skip


def test_a_group_that_ended_otherwise_is_told_with_its_status() -> None:
    store, _, b = two_prompts()
    end(store, b, "failure", now=90.0)
    answer = told(store, question(grouped=True), attached=["c2"])
    assert (
        "  'B' ended as 'failure' 10.0 s ago with 3 of 4 sessions, producer pid 22 on there "
        "(client c2): alive"
    ) in answer.text.splitlines()
    assert answer.stuck[0]["status"] == "failure"


def test_a_group_that_was_retired_with_rows_left_is_not_said_to_run() -> None:
    store, _, _ = two_prompts()
    store.apply_clear(P, ["B_0_0"], 90.0, retire=True)
    text = told(store, question(grouped=True)).text
    assert "  'B' began 12.3 s ago and was retired with 2 of 4 sessions, producer" in text


def test_a_finished_group_is_told_with_the_row_and_the_condition_that_fails() -> None:
    store, _, b = two_prompts()
    session(store, b, 3, status="failed")
    end(store, b, now=90.0)
    answer = told(store, question(where={"status": "completed"}, grouped=True, wanted=2))
    assert "  status = 'completed': 1 of 8 rows fails" in answer.text.splitlines()
    assert (
        "'B' finished 10.0 s ago with 4 of 4 sessions, but 1 of 4 rows fails: 'B_3_0' first "
        "(status = 'completed'), producer"
    ) in answer.text
    assert answer.stuck[0]["failing_key"] == "B_3_0"
    assert answer.stuck[0]["requirement"] == "status = 'completed'"


def test_a_finished_group_that_lacks_a_field_is_told_with_it() -> None:
    store, a, b = two_prompts()
    end(store, b, now=90.0)
    keys = [f"A_{i}_0" for i in range(4)]
    put(store, P, keys, Blocks().block(4, {"x": [1] * 4}), must_exist=True)
    answer = told(store, question(fields=["x"], grouped=True, wanted=2))
    assert (answer.matching, answer.total) == (1, 2)
    assert "but 3 of 3 rows fail: 'B_0_0' first (without 'x')" in answer.text
    assert a.status == "finished"


def test_sessions_are_counted_by_tag_and_by_row_where_there_is_none() -> None:
    store = TagStore(1)
    a, b = begin(store, "A", 5), begin(store, "B", 5)
    for index in range(3):  # three trajectories of two sessions
        put(store, P, [f"A_{index}"], None, [{"session_id": index // 2}], group=a)
        put(store, P, [f"B_{index}"], None, [{}], group=b)
    sessions = {s["key"]: s["sessions"] for s in told(store, question(grouped=True)).stuck}
    assert sessions == {"A": 2, "B": 3}


def test_groups_that_run_hold_up_those_who_wait_for_rows_too() -> None:
    store, _, _ = two_prompts()
    answer = told(store, question(where={"status": "completed"}, wanted=8))
    assert (answer.matching, answer.total) == (7, 9)  # prompts are rows
    assert "'B': running for 12.3 s, 3 of 4 sessions" in answer.text
    assert [s["key"] for s in answer.stuck] == ["B"]


def test_rows_without_a_group_do_not_count_and_it_says_so() -> None:
    store, _, _ = two_prompts()
    put(store, P, ["lone1", "lone2"], tags=[{"status": "completed"}] * 2)
    answer = told(store, question(where={"status": "completed"}, grouped=True, wanted=2))
    assert answer.matching == 1
    assert "  2 rows would match but belong to no group" in answer.text


def test_neither_prompts_nor_rows_without_their_fields_are_said_to_lack_a_group() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.block(1, {"x": [1]}), [{"n": 1}])
    put(store, P, ["b", "p"], tags=[{"n": 1}, {"n": 1, "is_prompt": True, "status": "finished"}])
    for fields, count in ((["x"], 1), ([], 2)):
        text = told(store, question(where={"n": 1}, fields=fields, grouped=True)).text
        assert f"  {count} rows would match but belong to no group" in text.replace(
            "1 row ", "1 rows "
        )


def test_the_ten_oldest_are_told_in_order_and_how_many_more_there_are() -> None:
    store = TagStore(1)
    ages = [5, 3, 9, 1, 7, 2, 8, 4, 6, 0, 11, 10]
    for age in ages:
        begin(store, f"g{age}", now=100.0 - age)
    answer = told(store, question(grouped=True))
    assert [s["key"] for s in answer.stuck] == [f"g{age}" for age in range(11, 1, -1)]
    assert len(answer.stuck) == SHOWN
    assert "\n  and 2 more\n" in answer.text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["running", "finished", "failure"]),
            st.lists(st.sampled_from(["completed", "failed"]), max_size=3),
        ),
        max_size=6,
    ),
    st.sampled_from([None, {"status": "completed"}, {"status": {"exists": False}}]),
)
def test_as_many_groups_match_as_a_view_says(groups: Any, where: Any) -> None:
    store = TagStore(1)
    put(store, P, ["x"], tags=[{}])
    for uid, (status, rows) in enumerate(groups):
        group = begin(store, f"g{uid}", 3)
        for number, row in enumerate(rows):
            session(store, group, number, status=row)
        if status != "running":
            end(store, group, status)
    partition = store.partition(P)
    asked = question(where=where, grouped=True)
    view = partition.views.open(
        condition_of(asked.predicate, asked.fields, grouped=True), asked.predicate
    )
    for _ in partition.views.scan(view):
        pass
    answer = told(store, asked)
    assert answer.matching == len(view.whole)
    assert answer.total == len(partition.groups)
    stuck = {group.uid for group in partition.groups.values()} - {g.uid for g in view.whole}
    assert {s["key"] for s in answer.stuck if "n" in s} == stuck


# -- prompts and rows outside groups ---------------------------------------------------------


def test_a_prompt_whose_producer_died_is_named_with_its_age_and_its_last_writer() -> None:
    # verl#7155
    store = TagStore(1)
    put(store, P, ["p1"], tags=[{"is_prompt": True, "status": "running"}], client_id="c1", now=10.0)
    put(store, P, ["p1"], tags=[{"attempts": 2}], client_id="c2", now=60.0)
    put(store, P, ["p0"], tags=[{"is_prompt": True, "status": "finished"}], client_id="c1", now=70)
    answer = told(store, question(where={"is_prompt": True, "status": "finished"}, wanted=2))
    assert answer.text.splitlines() == [
        "partition 'train': 1 of 2 rows match; 2 wanted",
        "  status = 'finished': 1 of 2 rows fails",
        "held up by, oldest first:",
        "  'p1': running, unchanged for 40.0 s, last written by pid 22 on there (client c2): dead",
        *answer.text.splitlines()[4:],
    ]
    assert answer.stuck == [{
        "key": "p1", "status": "running", "age_s": 40.0, "producer": "pid 22 on there",
        "client_id": "c2", "alive": False, "count": 1,
    }]  # fmt: skip


def test_rows_are_told_by_status_with_the_oldest_of_each() -> None:
    store = TagStore(1)
    for at, (key, status) in enumerate(
        [("a", "scoring"), ("b", "running"), ("c", "running"), ("d", "done"), ("e", "a b")], 1
    ):
        put(store, P, [key], tags=[{"status": status}], client_id="c1", now=float(at))
    put(store, P, ["b"], tags=[{"more": 1}], client_id="c2", now=9.0)
    lines = told(store, question(where={"status": "done"})).text.splitlines()
    at = lines.index("held up by, oldest first:")
    assert [line.partition(", last")[0] for line in lines[at + 1 : at + 4]] == [
        "  'a': scoring, unchanged for 99.0 s",
        "  2 rows: running, the oldest 'c', unchanged for 97.0 s",
        "  'e': status 'a b', unchanged for 95.0 s",
    ]


def test_rows_of_the_right_status_do_not_hold_up_what_fails_elsewhere() -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"], tags=[{"status": "done", "step": 1}, {"status": "done", "step": 2}])
    answer = told(store, question(where={"status": "done", "step": 2}, wanted=2))
    assert answer.stuck == []
    assert "held up" not in answer.text
    assert answer.failing == {"step = 2": 1}


def test_rows_that_lack_only_fields_are_told_with_the_oldest() -> None:
    answer = told(forty_rows(), question(where={"status": "finished"}, fields=["s"]))
    statuses = [(s["key"], s["status"], s["count"]) for s in answer.stuck]
    assert statuses == [("k0", "pending", 37), ("f2", "without 's'", 2)]


def test_an_unfinished_prompt_holds_up_even_if_it_matches() -> None:
    store = TagStore(1)
    tags = {"is_prompt": True, "uid": "p", "status": "pending"}
    put(store, P, ["p", "p_0_0"], tags=[tags, {"uid": "p"}], client_id="c1")
    for grouped in (False, True):
        answer = told(store, question(where={"uid": "p"}, grouped=grouped, wanted=5))
        assert [s["key"] for s in answer.stuck] == ["p"]


def test_a_finished_prompt_holds_up_nobody_who_does_not_ask_for_prompts() -> None:
    store = TagStore(1)
    put(store, P, ["p"], tags=[{"is_prompt": True, "status": "finished"}])
    assert told(store, question(where={"status": "completed"})).stuck == []
    of_prompts = {"status": "consumed", "is_prompt": True}
    assert [s["key"] for s in told(store, question(where=of_prompts)).stuck] == ["p"]


def test_the_prompt_of_a_group_is_not_told_beside_its_group() -> None:
    store, _, _ = two_prompts()
    answer = told(store, question(where={"status": "finished"}))
    assert [(s["key"], "n" in s) for s in answer.stuck] == [("B", True)]


def test_of_ever_so_many_statuses_few_are_told() -> None:
    store = TagStore(1)
    put(store, P, [f"k{i}" for i in range(300)], tags=[{"status": f"s{i}"} for i in range(300)])
    answer = told(store, question(where={"status": "done"}))
    assert len(answer.stuck) == SHOWN
    assert "  and 55 more\n" in answer.text  # 64 that are told apart, and the rest


@pytest.mark.parametrize("status", [None, 5, True, 2.5, ["a"], {"a": 1}, "\x1b[31m", "e\u0301"])
def test_any_status_can_be_told(status: Any) -> None:
    store = TagStore(1)
    put(store, P, ["k"], tags=[{"status": status}])
    answer = told(store, question(where={"status": "done"}))
    assert [s["key"] for s in answer.stuck] == ["k"]
    assert answer.text.isascii()
    assert all(line.isprintable() for line in answer.text.splitlines())


def aged(kept_s: float = 10.0) -> TagStore:
    """A store whose history has forgotten when row `old` was written."""
    store = TagStore(1, History(max_age_s=kept_s))
    put(store, P, ["old"], tags=[{"status": "running"}], client_id="c2", now=50.0)
    put(store, "other", ["x"], tags=[{}], client_id="c1", now=60.5)
    assert store.history.floor == 1
    return store


def test_beyond_history_the_age_is_a_bound_and_the_writer_who_put_it() -> None:
    answer = told(aged(), question(where={"status": "done"}))
    assert (
        "  'old': running, unchanged for more than 50.0 s, put by pid 22 on there (client c2): dead"
    ) in answer.text.splitlines()
    assert answer.stuck[0]["age_s"] == 50.0


def test_beyond_history_a_row_of_a_group_is_told_with_the_groups_producer() -> None:
    store = aged()
    group = begin(store, "G", by="c2", now=61.0)
    session(store, group, 0)
    store.upkeep(80.0)
    put(store, "other", ["y"], tags=[{}], client_id="c1", now=90.0)
    answer = told(store, question(fields=["x"]))
    [lacking] = [s for s in answer.stuck if s["status"] == "without 'x'"]
    assert (lacking["key"], lacking["client_id"], lacking["count"]) == ("old", "c2", 2)
    store.apply_clear(P, ["old"], 90.0)
    [lacking] = [s for s in told(store, question(fields=["x"])).stuck if "count" in s]
    assert (lacking["key"], lacking["client_id"]) == ("G_0_0", "c2")


def test_where_history_was_not_there_the_age_is_not_guessed() -> None:
    store = aged()
    store.history.floor_at = None  # as after a restore
    answer = told(store, question(where={"status": "done"}))
    assert "'old': running, unchanged for longer than is remembered, put by" in answer.text
    assert answer.stuck[0]["age_s"] is None


def test_a_writer_that_is_not_known_is_said_to_be_unknown() -> None:
    store = TagStore(1)
    put(store, P, ["k"], tags=[{"status": "running"}])
    text = told(store, question(where={"status": "done"})).text
    assert "last written by a client that is not known: dead" in text


# -- tasks -----------------------------------------------------------------------------------


def test_a_task_is_told_with_what_it_has_taken_and_who_has_it() -> None:
    store = TagStore(1)
    keys = [f"k{i}" for i in range(10)]
    put(store, P, keys, tags=[{"status": "done"}] * 10, client_id="c1")
    first = hold(store, "t", keys[:3], "c1", 90.0)
    store.partition(P).claims.tasks["t"].commit(first, keys[:3])
    hold(store, "t", keys[3:5], "c1", 90.0)
    hold(store, "t", keys[5:9], "c2", 60.0)
    answer = told(store, question(where={"status": "done"}, task="t", wanted=4))
    lines = answer.text.splitlines()
    assert lines[0] == (
        "partition 'train': 10 of 10 rows match, 1 of them ready for task 't'; 4 wanted"
    )
    assert lines[1:4] == [
        "task 't': 3 rows committed, 6 claimed",
        "  4 rows in 1 claim since 40.0 s by pid 22 on there (client c2): dead; they are offered "
        "again when its lease of 30 s is over",
        "  2 rows in 2 claims since 10.0 s by pid 11 on here (client c1): alive",
    ]
    assert answer.matching == 10


def test_a_task_that_never_claimed_is_said_to_be_new() -> None:
    text = told(forty_rows(), question(task="t")).text
    assert "40 of 40 rows match, 40 of them ready for task 't'" in text
    assert "task 't' has claimed nothing yet" in text


def test_a_group_of_which_a_row_is_taken_is_whole_but_not_ready() -> None:
    store, _, b = two_prompts()
    end(store, b)
    hold(store, "t", ["B_0_0"], "c1", 90.0)
    first = told(store, question(grouped=True, task="t")).text.splitlines()[0]
    assert "2 of 2 groups are whole and match, 1 of them ready" in first


def test_of_many_holders_those_with_most_are_named() -> None:
    store = TagStore(1)
    keys = [f"k{i}" for i in range(40)]
    put(store, P, keys, tags=[{}] * 40)
    for number in range(8):
        hold(store, "t", keys[5 * number : 5 * number + 1 + number % 5], f"w{number}", 90.0)
    lines = told(store, question(task="t")).text.splitlines()
    assert [line.split()[0] for line in lines if " claim since " in line] == list("54332")
    assert "  and more by 3 other clients" in lines


# -- memory ----------------------------------------------------------------------------------


def test_it_says_what_holds_the_memory() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.block(1, {"x": [2000]}), [{"n": 1}], client_id="c1")
    put(store, P, ["b"], blocks.block(1, {"x": [1]}), client_id="c2")
    partition = store.partition(P)
    partition.quota = Quota(bytes=1 << 20, rows=50, group_bytes=4096)
    group = Group("G", P, 99, 4, 2048, partition.producer("c2"), at=0.0)
    answer = told(store, question(), waiting={P: 3})
    extents = partition.account.extent_bytes
    assert (
        f"partition 'train' holds {size(extents)} of extents and 5 bytes of tags in 2 rows, keeps "
        "2.0 KiB and 4 rows for groups; quota bytes 1048576, rows 50, group_bytes 4096; 3 wait for "
        "room"
    ) in answer.text.splitlines()
    of_partition, *producers = answer.holders
    assert of_partition == {
        "partition_id": P, "rows": 2, "prompt_rows": 0, "extent_bytes": extents, "tag_bytes": 5,
        "held_bytes": 2048, "held_rows": 4, "waiting": 3,
        "quota": {"bytes": 1 << 20, "rows": 50, "group_bytes": 4096},
    }  # fmt: skip
    assert [(p["client_id"], p["alive"], p["rows"]) for p in producers] == [
        ("c1", True, 1), ("c2", False, 5),
    ]  # fmt: skip
    assert group.held_bytes == 2048


def test_rows_of_prompts_are_told_apart_where_a_quota_leaves_them_out() -> None:
    store, _, _ = two_prompts()
    assert "of tags in 9 rows, keeps" in told(store, question()).text
    store.partition(P).quota = Quota(rows=50)
    text = told(store, question()).text
    assert "of tags in 9 rows (no quota counts the 2 of prompts of groups), keeps" in text


def test_the_producers_with_most_are_named_and_those_with_nothing_are_not() -> None:
    store = TagStore(1)
    for number, name in enumerate("vwxyz"):
        put(store, P, [name], tags=[{"t": "x" * 10 * number}], client_id=name)
    store.apply_clear(P, ["z"], 0.0)
    store.apply_clear(P, ["x"], 0.0)

    def producers() -> list[Any]:
        return [h["client_id"] for h in told(store, question()).holders if "client_id" in h]

    assert producers() == ["y", "w", "v"]
    store.apply_clear(P, ["w", "v"], 0.0)
    assert producers() == ["y"]


def test_the_task_that_lags_is_named() -> None:
    store = forty_rows()
    lease = hold(store, "fast", ["k0", "k1"], "c1", 0.0)
    store.partition(P).claims.tasks["fast"].commit(lease, ["k0", "k1"])
    hold(store, "slow", ["k3"], "c1", 0.0)
    answer = told(store, question())
    assert "task 'slow' lags most: it has committed 0 rows" in answer.text
    assert answer.holders[-1] == {"partition_id": P, "task": "slow", "committed": 0}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1.0 KiB"),
     (12_058_624, "11.5 MiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")],
)  # fmt: skip
def test_bytes_are_told_as_people_read_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# -- the whole plane, and partitions that are not there --------------------------------------


def test_without_a_partition_the_whole_plane_is_told() -> None:
    store, _, _ = two_prompts()
    put(store, "val", ["v"], tags=[{"t": "x" * 1000}], client_id="c2")
    answer = told(store, question(None))
    lines = answer.text.splitlines()
    assert lines[:3] == [
        "the plane has 2 partitions with 10 rows and 2 groups",
        "held up by, oldest first:",
        "  in 'train': 'B': running for 12.3 s, 3 of 4 sessions, producer pid 22 on there "
        "(client c2): dead",
    ]
    assert lines[3].startswith("partition 'val' holds 0 bytes of extents and 1006 bytes of tags")
    assert [h["partition_id"] for h in answer.holders if "rows" in h and "client_id" not in h] == [
        "val", P,
    ]  # fmt: skip
    assert answer.stuck[0]["partition_id"] == P
    assert answer.total == 10


def test_of_many_partitions_the_largest_are_told() -> None:
    store = TagStore(1)
    for number in range(14):
        put(store, f"w@{number}", ["k"], tags=[{"t": "x" * number}])
    lines = told(store, question(None)).text.splitlines()
    told_of = [line.split("'")[1] for line in lines if line.startswith("partition ")]
    assert told_of == [f"w@{number}" for number in range(13, 3, -1)]
    assert lines[-1] == "and 4 partitions more, which hold less each"


def test_of_an_unknown_partition_it_names_those_that_are_most_like_it() -> None:
    store = TagStore(1)
    for name in ("val", "train", "rollout", "a", "b", "c", "d"):
        put(store, name, ["k"], tags=[{}])
    answer = told(store, question("trian", grouped=True, wanted=2))
    assert answer.text.startswith(
        "there is no partition 'trian'; 2 groups wanted; there are 'train', "
    )
    assert answer.text.endswith(" and 2 more")
    assert len(re.findall(r"'(\w+)'", answer.text)) == 1 + MAX_NAMES
    assert (answer.matching, answer.total, answer.stuck, answer.holders) == (0, 0, [], [])


def test_of_a_dropped_partition_it_says_when() -> None:
    store = forty_rows()
    for _ in store.apply_drop(store.partition(P), 0.0):
        pass
    answer = told(store, question(wanted=1), waiting={P: 2})
    assert answer.text.splitlines() == [
        "there is no partition 'train' (it was dropped at revision 4); 1 row wanted; there is none "
        "at all yet",
        "2 wait for room in it",
    ]


def test_an_empty_plane_can_be_told() -> None:
    answer = told(TagStore(1), question(None))
    assert answer.text == "the plane has 0 partitions with 0 rows and 0 groups"


# -- bounds ----------------------------------------------------------------------------------


def large(rows: int = 3 * CHUNK_ROWS) -> TagStore:
    store = TagStore(1)
    for at in range(0, rows, CHUNK_ROWS):
        keys = [f"k{i}" for i in range(at, at + CHUNK_ROWS)]
        put(store, P, keys, tags=[{"status": "pending"}] * CHUNK_ROWS, client_id="c1")
    return store


def test_no_more_rows_are_looked_at_than_allowed_and_it_says_so() -> None:
    answer = told(large(), question(where={"status": "done"}), allowance=Allowance(1000))
    assert "  only the first 1024 of 3072 rows could be looked at in time\n" in answer.text
    assert answer.total == answer.failing["status = 'done'"] == 1024
    assert "only the first" not in told(large(), question()).text


def test_groups_that_were_not_looked_at_do_not_count_as_whole() -> None:
    store, _, b = two_prompts()
    end(store, b)
    answer = told(store, question(grouped=True), allowance=Allowance(0))
    assert (answer.matching, answer.total) == (0, 2)
    assert "  none of 9 rows could be looked at in time\n" in answer.text


def test_a_group_of_which_some_rows_were_looked_at_is_not_called_whole() -> None:
    store = TagStore(1)
    group = begin(store, "G", 300)
    keys = [f"G_{i}" for i in range(300)]
    put(store, P, keys, None, [{"status": "completed"}] * 300, group=group)
    end(store, group)
    assert told(store, question(grouped=True)).matching == 1
    assert told(store, question(grouped=True), allowance=Allowance(100)).matching == 0


def test_a_step_looks_at_a_few_rows_only_and_fewer_if_they_are_costly() -> None:
    store = large(CHUNK_ROWS)
    for where, most in (
        ({"status": "done"}, STEP),
        ({"or": [{"a": i} for i in range(1000)]}, 8),
    ):
        allowance = Allowance()
        taken = [0]
        told(store, question(where=where), allowance=allowance,
             between=lambda taken=taken, a=allowance: taken.append(a.taken))  # fmt: skip
        looked = [after - before for before, after in pairwise(taken)]
        assert sum(looked) == CHUNK_ROWS
        assert max(looked) <= most


def test_who_has_no_time_left_is_answered_at_once() -> None:
    allowance = Allowance()
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        allowance.hurry()

    answer = told(large(100 * CHUNK_ROWS), question(where={"status": "done"}),
                  allowance=allowance, between=stop)  # fmt: skip
    assert steps < 10
    assert allowance.taken == FIRST_ROWS
    assert "  only the first 256 of 102400 rows could be looked at in time" in answer.text
    assert "256 rows: pending, the oldest 'k0'" in answer.text


def test_the_text_is_ascii_short_and_the_same_each_time() -> None:
    store = TagStore(1)
    nasty = ["\u202e" * 300, "\u00e9" * 500, "'\"\\" * 100, "k" * 1000, "\U0001f600" * 200]
    for number, name in enumerate(nasty * 6):
        group = begin(store, f"{number}{name}"[:1000].encode()[:1000].decode(errors="ignore"))
        group.open, group.status = False, "\u00fc" * 256
    tags = [{"is_prompt": True, "status": f"{number}{name}"} for number, name in enumerate(nasty)]
    put(store, P, [f"{name[:200]}." for name in nasty], tags=tags, client_id="\u00e9" * 64)
    labels = {"c1": "\u00e9" * 200}
    where = dict.fromkeys([*nasty, *map(str, range(20))], "x" * 500)
    for grouped in (True, False):
        asked = question(where=where, fields=nasty, wanted=3, task="\u00e9", grouped=grouped)
        texts = {told(store, asked, labels=labels).text for _ in range(3)}
        (text,) = texts
        assert text.isascii()
        assert 2000 < len(text) <= MAX_TEXT + len("\n...")
        assert text.endswith("\n...") is not grouped
        assert all(line.isprintable() for line in text.splitlines())
        assert all(len(line) < 600 for line in text.splitlines())


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_a_store_that_changes_meanwhile_is_told_all_the_same(random: Any, grouped: bool) -> None:
    store = large(CHUNK_ROWS)
    groups = [begin(store, f"g{i}") for i in range(20)]
    for group in groups:
        session(store, group, 0)
    steps = 0

    def change() -> None:
        nonlocal steps
        steps += 1
        if P not in store.partitions:
            return
        what = random.randrange(6)
        if what == 0:
            keys = list(rows_of(store, P))
            store.apply_clear(P, random.sample(keys, min(len(keys), 300)), 0.0)
        elif what == 1:
            put(store, P, [f"new{steps}"], tags=[{"status": "pending"}])
        elif what == 2 and groups:
            group = groups.pop(random.randrange(len(groups)))
            if group.open:
                end(store, group)
        elif what == 3:
            begin(store, f"g{random.randrange(25)}")
        elif what == 4 and random.random() < 0.1:
            for _ in store.apply_drop(store.partition(P), 0.0):
                pass
        else:
            store.upkeep(0.0)

    where = {"status": "completed"}
    answer = told(store, question(where=where, grouped=grouped, task="t", wanted=9), between=change)
    assert steps > 3
    assert 0 <= answer.matching <= answer.total
    assert answer.text.startswith("partition 'train': ")


# -- what is asked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ((5, None, [], None, False, None), "partition name is a string"),
        (("", None, [], None, False, None), "empty string is no partition name"),
        (("a\nb", None, [], None, False, None), "control characters"),
        (("p", 5, [], None, False, None), "where: a mapping"),
        (("p", {"a": {"~": 1}}, [], None, False, None), "unknown operator '~'"),
        (("p", None, "x", None, False, None), "fields is a list"),
        (("p", None, None, None, False, None), "fields is a list"),
        (("p", None, ["x", 5], None, False, None), "fields is a list"),
        (("p", None, ["x"] * 1025, None, False, None), "at most 1024 fields"),
        (("p", None, [], 5, False, None), "task is a string"),
        (("p", None, [], "", False, None), "empty string is no task"),
        (("p", None, [], None, 1, None), "grouped is true or false"),
        (("p", None, [], None, "uid", None), "grouped is true or false"),
        (("p", None, [], None, False, 0), "count is a number"),
        (("p", None, [], None, False, True), "count is a number"),
        (("p", None, [], None, False, 1.5), "count is a number"),
        (("p", None, [], None, False, 1 << 63), "count is a number"),
        ((None, {}, [], None, False, None), "about one partition"),
        ((None, None, ["x"], None, False, None), "about one partition"),
        ((None, None, [], "t", False, None), "about one partition"),
        ((None, None, [], None, True, None), "about one partition"),
        ((None, None, [], None, False, 1), "about one partition"),
        ((None, None, None, None, False, None), "about one partition"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_name(body: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Question.checked(*body)


def test_a_question_comes_as_it_was_asked() -> None:
    asked = Question.checked("p", {"a": 1}, ["x", "y", "x"], "t", True, 3)
    assert (asked.partition_id, asked.task, asked.grouped, asked.wanted) == ("p", "t", True, 3)
    assert asked.fields == {"x", "y"}
    assert asked.predicate({"a": 1})
    assert not asked.predicate({"a": 2})


# -- the foremost ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5)), st.integers(1, 4))
def test_the_foremost_are_the_largest_and_among_equals_the_first(
    keys: list[int], limit: int
) -> None:
    foremost: Foremost[int] = Foremost(limit)
    dropped = [foremost.offer(key, place) for place, key in enumerate(keys)]
    expected = sorted(range(len(keys)), key=lambda place: (-keys[place], place))
    assert foremost.in_order() == expected[:limit]
    assert foremost.left_out == max(0, len(keys) - limit)
    assert sorted(d for d in dropped if d is not None) == sorted(expected[limit:])


def test_what_producers_are_said_to_have_is_what_the_partition_is_said_to_hold() -> None:
    store, _, _ = two_prompts()
    of_partition, *producers = told(store, question()).holders
    rows: list[Any] = [of_partition["rows"], of_partition["held_rows"]]
    assert rows == [9, 1]
    assert of_partition["prompt_rows"] == 2
    assert sum([p["rows"] for p in producers]) == 9 - 2 + 1
