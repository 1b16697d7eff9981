"""Ready: order, exact counts, and bounded work however entries come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.claims.ready import RUN, Ready


def drain(ready: Ready) -> list[int]:
    return [ready.pop() for _ in range(len(ready))]


def test_the_least_key_comes_first_and_equal_keys_by_number() -> None:
    ready = Ready()
    for number, key in [(7, 2), (3, 1), (9, 1), (1, 3)]:
        ready.put(number, (key,))
    assert len(ready) == 4
    assert drain(ready) == [3, 9, 7, 1]
    assert len(ready) == 0


def test_a_number_that_is_put_again_has_its_new_place_only() -> None:
    ready = Ready()
    ready.put(1, (1,))
    ready.put(2, (2,))
    ready.put(1, (3,))
    assert len(ready) == 2
    assert drain(ready) == [2, 1]
    ready.put(1, (5,))
    ready.put(2, (6,))
    ready.put(2, (4,))
    assert drain(ready) == [2, 1]


def test_what_is_discarded_never_comes() -> None:
    ready = Ready()
    for number in range(10):
        ready.put(number, (number,))
    for number in [0, 5, 9, 5, 77]:
        ready.discard(number)
    assert 5 not in ready
    assert 4 in ready
    assert drain(ready) == [1, 2, 3, 4, 6, 7, 8]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 30), st.integers(0, 9)),
        st.tuples(st.just("discard"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.just(0)),
    ),
    max_size=200,
)


@given(operations)
def test_it_is_a_sorted_set(steps: list[tuple[str, int, int]]) -> None:
    ready, model = Ready(), dict[int, int]()
    for what, number, key in steps:
        if what == "put":
            ready.put(number, (key,))
            model[number] = key
        elif what == "discard":
            ready.discard(number)
            model.pop(number, None)
        elif model:
            least = min(model, key=lambda number: (model[number], number))
            assert ready.pop() == least
            del model[least]
        assert len(ready) == len(model)
    assert drain(ready) == sorted(model, key=lambda number: (model[number], number))


@pytest.mark.parametrize("seed", range(6))
def test_it_stays_sorted_over_many_runs(seed: int) -> None:
    r = random.Random(seed)
    ready, model = Ready(), dict[int, tuple[int, int]]()
    for step in range(20 * RUN):
        number = r.randrange(8 * RUN)
        act = r.random()
        if act < 0.55:
            key = step if seed % 2 else r.randrange(1000)
            ready.put(number, (key,))
            model[number] = (key, number)
        elif act < 0.8:
            ready.discard(number)
            model.pop(number, None)
        elif model:
            assert ready.pop() == number_of_least(model)
    assert drain(ready) == sorted(model, key=lambda number: model[number])


def number_of_least(model: dict[int, tuple[int, int]]) -> int:
    least = min(model, key=lambda number: model[number])
    del model[least]
    return least


def entries(ready: Ready) -> int:
    """Everything that is kept, dead or alive."""
    return sum(len(run.entries) for run in ready._runs.values()) + len(ready._tops)


def test_entries_that_are_gone_do_not_pile_up() -> None:
    ready = Ready()
    for number in range(50 * RUN):  # one stays in place, and is the first for ever
        ready.put(number, (number,))
        if number:
            ready.discard(number)
    assert entries(ready) <= 4 * RUN
    for key in range(50 * RUN):  # and rows that change and change
        ready.put(7, (key,))
        ready.put(8, (-key,))
    assert entries(ready) <= 8 * RUN
    assert drain(ready) == [8, 0, 7]


class Compared:
    """A key that counts how often any is compared."""

    times = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Compared) -> bool:
        Compared.times += 1
        return self.value < other.value


def test_no_single_step_takes_longer_than_a_run_does() -> None:
    """All but the ends are discarded from the back: a plain heap would pop over the whole gap."""
    count = 40 * RUN
    ready = Ready()
    most = 0

    def step(act: Callable[[], object]) -> None:
        nonlocal most
        Compared.times = 0
        act()
        most = max(most, Compared.times)

    for number in range(count):
        step(partial(ready.put, number, (Compared(number),)))
    for number in range(count - 2, 0, -1):
        step(partial(ready.discard, number))
    step(lambda: drain(ready) == [0, count - 1] or pytest.fail("wrong order"))
    assert 0 < most < 8 * RUN
