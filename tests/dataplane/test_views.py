"""Views: single rules by example, then every view against a recount over random changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.partition import Partition
from dataplane.tags.puts import PutRows
from dataplane.tags.query import compile_where
from dataplane.tags.rows import CHUNK_ROWS, Row
from dataplane.tags.store import TagStore
from dataplane.tags.views.moment import Moment
from dataplane.tags.views.views import MAX_IDLE, SCAN_STEP, View, condition_of
from tests.dataplane.audit import Blocks, put
from tests.dataplane.interleaving import clear_where


def store_with(rows: int = 0) -> TagStore:
    """A store with the partition p, of so many rows."""
    store = TagStore(1)
    put(store, "p", ["first"], tags=[{}])
    store.apply_clear("p", ["first"], 0.0)
    for at in range(0, rows, CHUNK_ROWS):
        keys = [f"row{i}" for i in range(at, min(at + CHUNK_ROWS, rows))]
        put(store, "p", keys, tags=[{"n": i} for i, _ in enumerate(keys, at)])
    return store


def opened(
    store: TagStore, where: Any = None, fields: Sequence[str] = (), *, grouped: bool = False
) -> View:
    """One more use of a view."""
    predicate = compile_where(where)
    condition = condition_of(predicate, frozenset(fields), grouped=grouped)
    return store.partition("p").views.open(condition, predicate)


def scanned(store: TagStore, view: View) -> View:
    for _ in store.partition("p").views.scan(view):
        pass
    assert view.complete
    return view


def keys_of(store: TagStore, view: View) -> list[str]:
    """The keys of the rows that a view holds, by slot."""
    slots = store.partition("p").slots
    found: list[str] = []
    for number, offsets in sorted(view.matching.items()):
        assert offsets
        for offset in sorted(offsets):
            row = slots.at(number * CHUNK_ROWS + offset)
            assert type(row) is Row
            found.append(row.key)
    assert view.count == len(found)
    return found


def read(moment: Moment) -> list[Row]:
    return [row for portion in moment.portions() for row in portion]


def begin(store: TagStore, uid: str, n: int = 2) -> Group:
    """Begin a group, as the server does."""
    tags = {"status": "running", "is_prompt": True}
    prompt = PutRows("p", [uid], [dict(tags)], [len(msgpack.packb(tags))], None)
    group = Group(uid, "p", store.n + 1, n, 0, store.partition("p").producer("c"), at=0.0)
    store.apply_begin(prompt, store.check_put(prompt), group, 0.0)
    return group


def end(store: TagStore, group: Group, status: str) -> None:
    put_of_prompt = None
    if store.partition("p").row(group.uid) is not None:
        tags: dict[str, Any] = {"status": status}
        prompt = PutRows("p", [group.uid], [tags], [len(msgpack.packb(tags))], None)
        put_of_prompt = prompt, store.check_put(prompt)
    store.apply_end(group, status, put_of_prompt, 0.0, "c")


class Log:
    """A subscriber that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def gained(self, position: int, row: Row) -> None:
        self.events.append(("gained", row.key))

    def lost(self, position: int, row: Row) -> None:
        self.events.append(("lost", row.key))

    def whole(self, group: Group) -> None:
        self.events.append(("whole", group.uid))

    def broken(self, group: Group) -> None:
        self.events.append(("broken", group.uid))

    def take(self) -> list[tuple[str, str]]:
        events, self.events = self.events, []
        return events


# -- rows ------------------------------------------------------------------------------------


def test_a_view_follows_puts_tag_updates_and_clears() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"status": "done"}))
    log = Log()
    view.subscribers.append(log)
    put(store, "p", ["a", "b"], tags=[{"status": "done"}, {"status": "running"}])
    assert keys_of(store, view) == ["a"]
    put(store, "p", ["b"], tags=[{"status": "done"}])
    assert keys_of(store, view) == ["a", "b"]
    assert log.take() == [("gained", "a"), ("gained", "b")]
    put(store, "p", ["a"], tags=[{"score": 1}])
    assert log.take() == [("gained", "a")]  # it matches still, and is another Row
    put(store, "p", ["a"], tags=[{"status": "used"}])
    store.apply_clear("p", ["a", "b"], 0.0)
    assert log.take() == [("lost", "a"), ("lost", "b")]
    assert (keys_of(store, view), view.size) == ([], 0)


def test_a_clear_by_predicate_is_heard() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"status": "done"}))
    keys = [f"k{i}" for i in range(5)]
    put(store, "p", keys, tags=[{"status": "done", "n": i} for i in range(5)])
    assert clear_where(store, "p", {"n": {">=": 2}}) == 3
    assert keys_of(store, view) == ["k0", "k1"]
    assert view.touched == store.n


def test_fields_have_to_be_produced_by_one_put_or_by_several() -> None:
    store = store_with()
    blocks = Blocks()
    view = scanned(store, opened(store, None, ["x", "s"]))
    put(store, "p", ["a", "b"], blocks.block(2, {"x": [1, 1]}))
    assert keys_of(store, view) == []
    put(store, "p", ["b"], blocks.block(1, {"s": []}))
    assert keys_of(store, view) == ["b"]
    put(store, "p", ["a"], blocks.block(1, {"x": [1], "s": [], "f": [2]}))
    assert keys_of(store, view) == ["a", "b"]


def test_a_key_that_is_cleared_and_put_again_has_another_slot() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"v": 1}))
    put(store, "p", ["a"], tags=[{"v": 1}])
    before = {n: set(offsets) for n, offsets in view.matching.items()}
    store.apply_clear("p", ["a"], 0.0)
    put(store, "p", ["a"], tags=[{"v": 1}])
    assert keys_of(store, view) == ["a"]
    assert view.matching != before


@pytest.mark.parametrize(
    "values",
    [
        [1, True, "1", 1.0, 1.5, None],
        [[1], {"a": 1}, 1],  # what cannot be in an index
    ],
)
def test_the_index_takes_no_value_for_another(values: list[Any]) -> None:
    store = store_with()
    wheres = [{"v": 1}, {"v": True}, {"v": "1"}, {"v": None}, {"v": [1]}]
    views = [scanned(store, opened(store, where)) for where in wheres]
    for i, value in enumerate(values):
        put(store, "p", [f"k{i}"], tags=[{"v": value}])
    for where, view in zip(wheres, views, strict=True):
        predicate = compile_where(where)
        expected = [f"k{i}" for i, value in enumerate(values) if predicate({"v": value})]
        assert keys_of(store, view) == expected
    for i, value in enumerate(reversed(values)):
        put(store, "p", [f"k{i}"], tags=[{"v": value}])
    for where, view in zip(wheres, views, strict=True):
        predicate = compile_where(where)
        expected = [f"k{i}" for i, value in enumerate(reversed(values)) if predicate({"v": value})]
        assert keys_of(store, view) == expected


def test_rows_that_are_cleared_together_leave_chunk_by_chunk() -> None:
    store = store_with(3 * CHUNK_ROWS)
    partition = store.partition("p")
    view = scanned(store, opened(store, {"n": {">=": 10}}))
    log = Log()
    view.subscribers.append(log)
    moment = partition.views.moment(view)
    keys = [f"row{i}" for i in (5, 20, 1500, 21, 2999, 6)]
    rows = [partition.row(key) for key in keys]
    positions = [partition.index.get(key) for key in keys]
    partition.views.cleared(rows, positions, 99)
    assert sorted(log.take()) == [("lost", key) for key in sorted(keys[1:5])]
    assert (view.count, view.touched) == (3 * CHUNK_ROWS - 14, 99)
    assert len(read(moment)) == 3 * CHUNK_ROWS - 10
    gone = [row for row in partition.slots if row.tags["n"] >= CHUNK_ROWS]
    places = [partition.index.get(row.key) for row in gone]
    partition.views.cleared(gone, places, 100)
    assert set(view.matching) == {0, 1}  # the slots begin with one row that was cleared before


# -- what a change costs ---------------------------------------------------------------------


class Counted:
    """How often predicates are evaluated, by patching `View.matches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        matches = View.matches

        def counted(view: View, row: Row) -> bool:
            self.count += 1
            return matches(view, row)

        monkeypatch.setattr(View, "matches", counted)

    def during(self, act: Callable[[], object]) -> int:
        before = self.count
        act()
        return self.count - before


def test_a_change_looks_at_the_views_of_its_value_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(3000)
    views = [scanned(store, opened(store, {"s": "done", "uid": f"u{i}"})) for i in range(200)]
    counted = Counted(monkeypatch)
    tags = {"s": "done", "uid": "u7"}
    # The first view is found by s, before it was known that all of them share it.
    assert counted.during(lambda: put(store, "p", ["a"], tags=[tags])) <= 2
    assert counted.during(lambda: put(store, "p", ["a"], tags=[{"uid": "u8"}])) <= 3
    assert [view.count for view in views] == [int(i == 8) for i in range(200)]


def test_equal_conditions_are_one_view_and_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with()
    spellings = [
        {"a": 1, "b": 2},
        {"b": {"=": 2.0}, "a": {"in": [1]}},
        {"and": [{"b": 2}, {"a": 1}]},
    ]
    views = {scanned(store, opened(store, where)) for where in spellings for _ in range(100)}
    assert len(views) == 1
    counted = Counted(monkeypatch)
    assert counted.during(lambda: put(store, "p", ["k"], tags=[{"a": 1, "b": 2}])) == 1
    other_fields = opened(store, spellings[0], ["x"])
    grouped = opened(store, spellings[0], grouped=True)
    assert len({*views, other_fields, grouped}) == 3


def test_views_that_nobody_uses_are_kept_for_a_while() -> None:
    store = store_with()
    views = store.partition("p").views
    first = scanned(store, opened(store, {"v": 0}))
    for i in range(1, MAX_IDLE + 1):
        views.close(scanned(store, opened(store, {"v": i})))
    assert len(views) == MAX_IDLE + 1
    views.close(first)
    assert len(views) == MAX_IDLE
    assert opened(store, {"v": 0}) is first  # the one used last was kept
    for i in range(2, MAX_IDLE + 1):
        assert opened(store, {"v": i}).complete
    for i in range(MAX_IDLE + 1):
        views.close(scanned(store, opened(store, {"w": i})))
    assert opened(store, {"v": 0}) is first  # nor are those taken that are in use again
    assert not opened(store, {"v": MAX_IDLE + 1}).complete


def test_a_view_that_was_never_scanned_is_not_kept() -> None:
    store = store_with()
    views = store.partition("p").views
    one, other = opened(store, {"v": 0}), opened(store, {"v": {">": 5}})
    assert views.active
    views.close(one)
    views.close(other)
    assert (len(views), views.active) == (0, False)
    put(store, "p", ["k"], tags=[{"v": 0}])
    assert views.take_stirred() == {}


def test_a_view_of_groups_that_is_gone_hears_no_more_of_them() -> None:
    store = store_with()
    views = store.partition("p").views
    group = begin(store, "u")
    put(store, "p", ["u_0"], tags=[{}], group=group)
    view = scanned(store, opened(store, grouped=True))
    views.close(view)
    for i in range(MAX_IDLE):
        views.close(scanned(store, opened(store, {"w": i})))
    end(store, group, "finished")
    assert view.size == 0
    assert views.take_stirred() == {}


# -- scans -----------------------------------------------------------------------------------


def test_a_scan_goes_in_steps_and_changes_may_come_between() -> None:
    store = store_with(3 * CHUNK_ROWS)
    view = opened(store, {"n": {">=": 10}})
    log = Log()
    view.subscribers.append(log)
    scan = store.partition("p").views.scan(view)
    next(scan)
    put(store, "p", ["row0", "row5"], tags=[{"n": 99}, {"n": 99}])  # behind the scan
    put(store, "p", ["row11", "row3000"], tags=[{"n": 1}, {"n": 1}])  # behind it, and before it
    put(store, "p", ["row2999"], tags=[{"n": 5000}])
    store.apply_clear("p", ["row12", "row2998"], 0.0)
    put(store, "p", ["new", "row12"], tags=[{"n": 10}, {"n": 10}])
    assert not view.complete
    for _ in scan:
        pass
    expected = {f"row{i}" for i in range(10, 3 * CHUNK_ROWS)} - {"row11", "row3000", "row2998"}
    expected |= {"row0", "row5", "new", "row12"}
    assert set(keys_of(store, view)) == expected
    gained = {key for event, key in log.events if event == "gained"}
    lost = {key for event, key in log.events if event == "lost"}
    assert gained - expected <= lost
    assert expected <= gained


def test_a_scan_takes_so_many_steps_and_stops_when_its_view_is_gone() -> None:
    store = store_with(3 * CHUNK_ROWS)
    view = opened(store, {"v": 1})
    assert sum(1 for _ in store.partition("p").views.scan(view)) >= 3 * CHUNK_ROWS / SCAN_STEP
    assert list(store.partition("p").views.scan(view)) == []
    left = opened(store, {"v": 2})
    scan = store.partition("p").views.scan(left)
    next(scan)
    store.partition("p").views.close(left)
    for i in range(MAX_IDLE):
        store.partition("p").views.close(scanned(store, opened(store, {"w": i})))
    assert list(scan) == []
    assert not left.complete


# -- what concerns a view --------------------------------------------------------------------


@pytest.mark.parametrize("counting", [False, True])
def test_a_view_is_touched_by_what_matches_or_matched(counting: bool) -> None:
    store = store_with()
    put(store, "p", ["old", "other"], tags=[{"v": 1}, {"v": 2}])
    view = opened(store, {"v": 1})
    if counting:
        scanned(store, view)
    views = store.partition("p").views
    views.take_stirred()

    def touches(act: Callable[[], object]) -> bool:
        before = view.touched
        act()
        stirred = view in views.take_stirred()
        assert stirred is (view.touched == store.n) is (view.touched != before)
        return stirred

    assert view.touched == store.n  # what was before is not known
    assert touches(lambda: put(store, "p", ["new"], tags=[{"v": 1}]))
    assert touches(lambda: put(store, "p", ["new"], tags=[{"w": 5}]))
    assert touches(lambda: put(store, "p", ["new"], tags=[{"v": 2}]))
    assert not touches(lambda: put(store, "p", ["new"], tags=[{"w": 6}]))
    assert not touches(lambda: store.apply_clear("p", ["new", "other"], 0.0))
    assert touches(lambda: store.apply_clear("p", ["old"], 0.0))


def test_a_row_that_the_scan_has_not_come_to_touches_its_view() -> None:
    store = store_with(2 * CHUNK_ROWS)
    view = opened(store, {"n": {"<": 5000}})
    scan = store.partition("p").views.scan(view)
    next(scan)
    put(store, "p", ["row2000"], tags=[{"n": 9999}])
    assert view.touched == store.n
    store.apply_clear("p", ["row2001"], 0.0)
    assert view.touched == store.n


def test_the_end_of_a_group_touches_a_view_that_is_not_scanned_yet() -> None:
    store = store_with()
    group = begin(store, "u")
    put(store, "p", ["u_0"], tags=[{}], group=group)
    view = opened(store, grouped=True)
    end(store, group, "finished")
    assert view.touched == store.n
    assert view in store.partition("p").views.take_stirred()


def test_the_first_revision_that_concerned_a_view_is_told() -> None:
    store = store_with()
    view, other = opened(store, {"v": 1}), opened(store)
    put(store, "p", ["a"], tags=[{"v": 2}])
    put(store, "p", ["a", "b"], tags=[{"v": 1}, {"v": 1}])
    first = store.n
    put(store, "p", ["b"], tags=[{"v": 3}])
    assert store.partition("p").views.take_stirred() == {view: first, other: first - 1}
    assert (view.touched, other.touched) == (store.n, store.n)
    store.apply_clear("p", ["b"], 0.0)
    assert store.partition("p").views.take_stirred() == {other: store.n}


def test_a_view_that_does_not_count_looks_at_no_more_than_it_has_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_with()
    keys = [f"k{i}" for i in range(100)]
    opened(store, {"v": {">=": 50}})
    counted = Counted(monkeypatch)
    tags = [{"v": i} for i in range(100)]
    assert counted.during(lambda: put(store, "p", keys, tags=tags)) == 51
    assert counted.during(lambda: put(store, "p", keys[90:], tags=[{"w": 1}] * 10)) == 1


# -- groups ----------------------------------------------------------------------------------


def test_a_group_is_whole_when_it_has_finished_and_all_of_its_rows_match() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"ok": True}, grouped=True))
    log = Log()
    view.subscribers.append(log)
    group = begin(store, "u")
    put(store, "p", ["u_0", "u_1"], tags=[{"ok": True}, {"ok": False}], group=group)
    put(store, "p", ["loose", "u"], tags=[{"ok": True}, {"ok": True}])
    assert log.take() == [("gained", "u_0")]  # neither the loose row nor the prompt counts
    end(store, group, "finished")
    assert view.size == 0
    put(store, "p", ["u_1"], tags=[{"ok": True}])
    assert log.take() == [("gained", "u_1"), ("whole", "u")]
    assert (view.size, list(view.whole)) == (1, [group])
    put(store, "p", ["u_0"], tags=[{"ok": None}])
    assert log.take() == [("lost", "u_0"), ("broken", "u")]
    store.apply_clear("p", ["u_0"], 0.0)
    assert log.take() == [("whole", "u")]  # what did not match is gone
    store.apply_clear("p", ["u_1"], 0.0)
    assert log.take() == [("lost", "u_1"), ("broken", "u")]
    assert view.groups == {}


def test_a_prompt_that_was_put_for_its_own_group_is_none_of_its_rows() -> None:
    store = store_with()
    view = scanned(store, opened(store, grouped=True))
    group = begin(store, "u")
    store.apply_clear("p", ["u"], 0.0)
    put(store, "p", ["u", "u_0"], tags=[{}, {}], group=group)
    end(store, group, "finished")
    assert (keys_of(store, view), list(view.whole)) == (["u_0"], [group])


def test_a_group_that_fails_or_has_no_row_is_never_whole() -> None:
    store = store_with()
    view = scanned(store, opened(store, grouped=True))
    failed, empty, running = begin(store, "f"), begin(store, "e"), begin(store, "r")
    put(store, "p", ["f_0"], tags=[{}], group=failed)
    put(store, "p", ["r_0"], tags=[{}], group=running)
    end(store, failed, "failure")
    end(store, empty, "finished")
    assert view.size == 0
    end(store, running, "finished")
    assert list(view.whole) == [running]
    assert view.touched == store.n


def test_a_row_that_moves_to_another_group_is_counted_there() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"ok": True}, grouped=True))
    one, other = begin(store, "one"), begin(store, "other")
    keys = ["a", "b", "c"]
    put(store, "p", keys, tags=[{"ok": True}, {"ok": True}, {"ok": False}], group=one)
    end(store, one, "finished")
    assert view.size == 0
    put(store, "p", ["c"], tags=[{"n": 1}], group=other)
    assert (list(view.whole), view.touched) == ([one], store.n)
    put(store, "p", ["b"], tags=[{"n": 1}], group=other)
    assert (list(view.whole), view.groups) == ([one], {one: 1, other: 1})
    put(store, "p", ["c"], tags=[{"ok": True}])
    end(store, other, "finished")
    assert list(view.whole) == [one, other]


def test_a_new_attempt_breaks_the_older_one() -> None:
    store = store_with()
    view = scanned(store, opened(store, grouped=True))
    first = begin(store, "u")
    put(store, "p", ["u_0"], tags=[{}], group=first)
    end(store, first, "finished")
    assert view.size == 1
    second = begin(store, "u")
    assert (view.size, view.touched) == (0, store.n)
    put(store, "p", ["u_0"], tags=[{}], group=second)
    end(store, second, "finished")
    assert list(view.whole) == [second]


def test_a_scan_finds_groups_that_are_whole_already() -> None:
    store = store_with(SCAN_STEP)
    groups = [begin(store, f"u{i}") for i in range(3)]
    for group in groups:
        keys = [f"{group.uid}_{i}" for i in range(200)]
        put(store, "p", keys, tags=[{"ok": True}] * 200, group=group)
    for group in groups[:2]:
        end(store, group, "finished")
    view = opened(store, {"ok": True}, grouped=True)
    for _ in store.partition("p").views.scan(view):
        assert all(view.groups[group] == 200 for group in view.whole)
    assert list(view.whole) == groups[:2]


# -- moments ---------------------------------------------------------------------------------


def test_a_moment_stays_as_it_was_oldest_revision_first() -> None:
    store = store_with(2 * CHUNK_ROWS)
    view = scanned(store, opened(store, {"n": {">=": 1000}}))
    put(store, "p", ["row1001", "row1000"], tags=[{"m": 1}, {"m": 1}])
    moment = store.partition("p").views.moment(view)
    n = store.n
    last = ["row1000", "row1001"]  # one revision: in the order of their slots
    expected = [f"row{i}" for i in range(1002, 2 * CHUNK_ROWS)] + last
    put(store, "p", ["row1500", "later"], tags=[{"n": 2000}, {"n": 2000}])
    store.apply_clear("p", ["row1600"], 0.0)
    put(store, "p", ["row1700"], tags=[{"n": 0}])
    rows = read(moment)
    assert [row.key for row in rows] == expected
    assert [row.revision for row in rows] == sorted(row.revision for row in rows)
    assert max(row.revision for row in rows) == n == moment.revision
    assert rows[498].tags == {"n": 1500}
    assert view.count == len(expected) - 1


def test_rows_of_chunks_that_overlap_in_time_are_merged() -> None:
    store = store_with(3 * CHUNK_ROWS)
    view = scanned(store, opened(store))
    for i in (5, 2500, 1500, 2501, 6):
        put(store, "p", [f"row{i}"], tags=[{"v": i}])
    rows = read(store.partition("p").views.moment(view))
    assert len(rows) == 3 * CHUNK_ROWS
    assert [row.key for row in rows[-5:]] == [f"row{i}" for i in (5, 2500, 1500, 2501, 6)]
    assert [row.revision for row in rows] == sorted(row.revision for row in rows)


def test_a_moment_of_groups_has_the_rows_of_whole_ones() -> None:
    store = store_with()
    view = scanned(store, opened(store, {"ok": True}, grouped=True))
    whole, half = begin(store, "w"), begin(store, "h")
    put(store, "p", ["h_0", "w_0"], tags=[{"ok": True}] * 2, group=half)
    put(store, "p", ["w_0", "w_1"], tags=[{"ok": True}] * 2, group=whole)
    put(store, "p", ["h_1"], tags=[{"ok": False}], group=half)
    end(store, whole, "finished")
    end(store, half, "finished")
    moment = store.partition("p").views.moment(view)
    put(store, "p", ["w_0"], tags=[{"ok": False}])
    assert [row.key for row in read(moment)] == ["w_0", "w_1"]


# -- anything --------------------------------------------------------------------------------


class Kind(NamedTuple):
    where: Any
    fields: frozenset[str]
    grouped: bool
    holds: Callable[[dict[str, Any]], bool]
    """The same as `where`, in Python."""


KINDS = [
    Kind(None, frozenset(), False, lambda tags: True),
    Kind({"v": 1}, frozenset(), False, lambda tags: tags.get("v") == 1),
    Kind({"v": 1, "w": 2}, frozenset(), False, lambda t: t.get("v") == 1 and t.get("w") == 2),
    Kind({"w": {">=": 2}}, frozenset("x"), False, lambda tags: tags.get("w", 0) >= 2),
    Kind(None, frozenset("xs"), False, lambda tags: True),
    Kind(None, frozenset(), True, lambda tags: True),
    Kind({"v": 1}, frozenset(), True, lambda tags: tags.get("v") == 1),
    Kind({"v": {"!=": 1}}, frozenset("x"), True, lambda tags: tags.get("v") != 1),
]

UIDS = ["u", "v"]
KEYS = [f"k{i}" for i in range(8)] + UIDS
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
some_tags = st.dictionaries(st.sampled_from("vw"), st.integers(0, 3), max_size=2)


class ModelRow(NamedTuple):
    tags: dict[str, Any]
    fields: frozenset[str]
    group: Group | None
    revision: int


class Watched:
    """One use of a view, and what the model and a subscriber say of it."""

    def __init__(self, kind: Kind, view: View, born: int) -> None:
        self.kind = kind
        self.view = view
        self.scan: Iterator[None] | None = None
        self.touched = born
        self.rows: dict[int, Row] = {}
        self.groups: set[Group] = set()

    def gained(self, position: int, row: Row) -> None:
        self.rows[position] = row

    def lost(self, position: int, row: Row) -> None:
        assert self.rows.pop(position) is row

    def whole(self, group: Group) -> None:
        # Told again of a group that stays whole with other rows than before.
        assert self.view.whole.keys() >= {group}
        self.groups.add(group)

    def broken(self, group: Group) -> None:
        self.groups.remove(group)


class ViewSteps(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = TagStore(1, History(max_changes=60))
        self.blocks = Blocks()
        self.rows: dict[str, ModelRow] = {}
        self.open_groups: list[Group] = []
        self.uses: list[Watched] = []
        self.moments: list[tuple[Iterator[list[Row]], list[str], list[str]]] = []
        # What follows lies on both sides of a border between chunks.
        filler = [f"f{i}" for i in range(CHUNK_ROWS - 6)]
        put(self.store, "p", filler, tags=[{}] * len(filler))
        self.store.apply_clear("p", filler, 0.0)
        put(self.store, "p", ["k0"], tags=[{}])
        self.rows["k0"] = ModelRow({}, frozenset(), None, self.store.n)
        self.views = self.store.partition("p").views

    # What the model says.

    def matches(self, kind: Kind, key: str) -> bool:
        row = self.rows[key]
        if kind.grouped and row.group is None:
            return False
        return kind.holds(row.tags) and kind.fields <= row.fields

    def matching(self, kind: Kind) -> set[str]:
        return {key for key in self.rows if self.matches(kind, key)}

    def whole(self, kind: Kind) -> set[Group]:
        groups: dict[Group, bool] = {}
        for key, row in self.rows.items():
            if row.group is not None:
                groups[row.group] = groups.get(row.group, True) and self.matches(kind, key)
        return {g for g, all_match in groups.items() if all_match and g.status == "finished"}

    def change(self, keys: Sequence[str], act: Callable[[], None]) -> None:
        """Make a change of these keys, and see which views it should touch."""
        before = [(self.matching(use.kind) & set(keys), self.whole(use.kind)) for use in self.uses]
        act()
        stirred = self.views.take_stirred()
        for use, (had, whole) in zip(self.uses, before, strict=True):
            has = self.matching(use.kind) & set(keys)
            if had or has or (use.kind.grouped and whole != self.whole(use.kind)):
                use.touched = self.store.n
                first = stirred[use.view]
                # A group that loses a row to another may be told of one revision too early.
                assert first == self.store.n or (use.kind.grouped and first == self.store.n - 1)
            elif not use.kind.grouped:
                assert use.view not in stirred

    # Rules.

    @rule(
        keys=some_keys,
        tags=some_tags,
        names=st.lists(st.sampled_from("xs"), max_size=2, unique=True),
        pick=st.none() | st.integers(0, 5),
    )
    def put_rows(self, keys: list[str], tags: Any, names: list[str], pick: int | None) -> None:
        group = None
        if pick is not None and self.open_groups:
            group = self.open_groups[pick % len(self.open_groups)]
        count = len(keys)
        block = None
        if names:
            block = self.blocks.block(count, {n: [1] * count if n == "x" else [] for n in names})

        def act() -> None:
            put(self.store, "p", keys, block, [tags] * count, group=group)
            for key in keys:
                old = self.rows.get(key, ModelRow({}, frozenset(), None, 0))
                # A prompt's row is never among the rows of its own group.
                joins = group is not None and key != group.uid
                self.rows[key] = ModelRow(
                    {**old.tags, **tags},
                    old.fields | set(names),
                    group if joins else old.group,
                    self.store.n,
                )

        self.change(keys, act)

    @rule(keys=some_keys)
    def clear_keys(self, keys: list[str]) -> None:
        def act() -> None:
            self.store.apply_clear("p", keys, 0.0)
            for key in keys:
                self.rows.pop(key, None)

        self.change(keys, act)

    @rule(value=st.integers(0, 3))
    def clear_matching(self, value: int) -> None:
        keys = [key for key, row in self.rows.items() if row.tags.get("w") == value]

        def act() -> None:
            assert clear_where(self.store, "p", {"w": value}) == len(keys)
            for key in keys:
                del self.rows[key]

        self.change(keys, act)

    @rule(uid=st.sampled_from(UIDS))
    def begin_group(self, uid: str) -> None:
        older = self.store.partition("p").groups.get(uid)
        gone = [key for key, row in self.rows.items() if row.group is older and older is not None]

        def act() -> None:
            group = begin(self.store, uid)
            self.open_groups = [g for g in self.open_groups if g is not older] + [group]
            for key in gone:
                del self.rows[key]
            old = self.rows.get(uid, ModelRow({}, frozenset(), None, 0))
            tags = {**old.tags, "status": "running", "is_prompt": True}
            self.rows[uid] = ModelRow(tags, old.fields, old.group, self.store.n)

        self.change([*gone, uid], act)

    @rule(pick=st.integers(0, 5), status=st.sampled_from(["finished", "finished", "failure"]))
    def end_group(self, pick: int, status: str) -> None:
        if not self.open_groups:
            return
        group = self.open_groups.pop(pick % len(self.open_groups))

        def act() -> None:
            end(self.store, group, status)
            if group.uid in self.rows:
                old = self.rows[group.uid]
                self.rows[group.uid] = old._replace(
                    tags={**old.tags, "status": status}, revision=self.store.n
                )

        self.change([group.uid], act)

    @rule(kind=st.sampled_from(KINDS), subscribe=st.booleans(), steps=st.integers(0, 20))
    def open_view(self, kind: Kind, subscribe: bool, steps: int) -> None:
        if len(self.uses) >= 5:
            return
        view = opened(self.store, kind.where, sorted(kind.fields), grouped=kind.grouped)
        use = Watched(kind, view, view.touched)
        if subscribe and not view.counting:
            view.subscribers.append(use)
        if subscribe or steps:
            use.scan = self.views.scan(view)
        self.uses.append(use)
        for _, _ in zip(range(steps), use.scan or (), strict=False):
            pass

    @rule(pick=st.integers(0, 5), steps=st.integers(1, 30))
    def scan_on(self, pick: int, steps: int) -> None:
        if self.uses:
            use = self.uses[pick % len(self.uses)]
            use.scan = use.scan or self.views.scan(use.view)
            for _, _ in zip(range(steps), use.scan, strict=False):
                pass

    @rule(pick=st.integers(0, 5))
    def close_view(self, pick: int) -> None:
        if self.uses:
            use = self.uses.pop(pick % len(self.uses))
            if use in use.view.subscribers:
                use.view.subscribers.remove(use)
            self.views.close(use.view)

    @rule(pick=st.integers(0, 5), ahead=st.integers(0, 3))
    def take_moment(self, pick: int, ahead: int) -> None:
        complete = [use for use in self.uses if use.view.complete]
        if not complete or len(self.moments) >= 4:
            return
        kind = (use := complete[pick % len(complete)]).kind
        keys = self.matching(kind)
        if kind.grouped:
            whole = self.whole(kind)
            keys = {key for key in keys if self.rows[key].group in whole}
        index = self.store.partition("p").index
        order = sorted(keys, key=lambda key: (self.rows[key].revision, index.get(key)))
        portions = self.views.moment(use.view).portions()
        seen = [row.key for _, p in zip(range(ahead), portions, strict=False) for row in p]
        self.moments.append((portions, seen, order))

    @rule(pick=st.integers(0, 3))
    def read_moment(self, pick: int) -> None:
        if self.moments:
            portions, seen, order = self.moments.pop(pick % len(self.moments))
            assert seen + [row.key for portion in portions for row in portion] == order

    # What holds after every step.

    @invariant()
    def views_are_as_a_recount_says(self) -> None:
        slots = self.store.partition("p").slots
        for use in self.uses:
            view, kind = use.view, use.kind
            if kind.grouped:
                assert view.touched >= use.touched
            else:
                assert view.touched == use.touched
            found = set(keys_of(self.store, view))
            whole = set(view.whole)
            if view.complete:
                assert found == self.matching(kind)
                assert whole == (self.whole(kind) if kind.grouped else set())
                assert view.size == len(whole if kind.grouped else found)
            else:
                assert found <= self.matching(kind)
                assert whole <= self.whole(kind)
            if use in view.subscribers:
                assert {row.key for row in use.rows.values()} == found
                assert all(slots.at(position) is row for position, row in use.rows.items())
                assert use.groups == whole


def one_by_one(partition: Partition, rows: Any, positions: Any, revision: int) -> None:
    for position, row in zip(positions, rows, strict=True):
        partition.views.changed(position, row, None, revision)


def together(partition: Partition, rows: Any, positions: Any, revision: int) -> None:
    partition.views.cleared(rows, positions, revision)


@pytest.mark.parametrize("tell", [one_by_one, together])
def test_views_agree_with_a_recount_over_any_changes(
    tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def departed(partition: Partition, rows: Any, positions: Any, revision: int) -> None:
        groups = {row.account for row in rows if type(row.account) is Group}
        for position, row in zip(positions, rows, strict=True):
            if row.account in groups:
                row.account.positions.discard(position)
        tell(partition, rows, positions, revision)
        for group in groups:
            partition.touched[group] = None
            partition.views.group_changed(group)

    monkeypatch.setattr(Partition, "_departed", departed)
    run_state_machine_as_test(
        ViewSteps,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_partition_begins_without_views() -> None:
    partition = Partition("p")
    assert (len(partition.views), partition.views.active) == (0, False)
    partition.views.group_changed(Group("u", "p", 1, 1, 0, partition.producer("c"), at=0.0))
    assert partition.views.take_stirred() == {}
