"""Requests that are repeated: one effect, one answer, and an honest word when it is forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.numbers import MAX_UNKNOWN, UNKNOWN_FOR, RequestNumbers
from dataplane.errors import AlreadyWritten, DataplaneError, OutcomeUnknown, RequestError
from dataplane.server.tag_service import TagService
from dataplane.tags.journal import FileJournal
from dataplane.tags.requests import MAX_OPEN, ClientRequests
from dataplane.tags.store import MAX_GONE, TagStore
from dataplane.wire.messages import IF_ABSENT, RETRY, PutAnswer, PutMeta
from tests.dataplane.audit import tags_of


def test_an_answer_is_recalled_until_its_number_is_settled() -> None:
    requests = ClientRequests()
    assert requests.recall(1, "c/1") is None
    requests.remember(1, "one")
    requests.remember(3, "three")
    assert requests.recall(1, "c/1") == "one"
    assert requests.recall(2, "c/2") is None
    assert requests.recall(3, "c/3") == "three"
    requests.settle(2)
    assert requests.recall(3, "c/3") == "three"
    for number in (1, 2):
        with pytest.raises(OutcomeUnknown, match=f"c/{number}") as error:
            requests.recall(number, f"c/{number}")
        assert error.value.request_id == f"c/{number}"


def test_settling_less_than_before_takes_nothing_back() -> None:
    requests = ClientRequests()
    requests.remember(7, "seven")
    requests.settle(5)
    requests.settle(2)
    assert requests.floor == 5
    with pytest.raises(OutcomeUnknown):
        requests.recall(4, "c/4")
    assert requests.recall(7, "c/7") == "seven"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("settle"), st.integers(0, 60)),
            st.tuples(st.just("remember"), st.integers(1, 60)),
        ),
        max_size=60,
    )
)
def test_what_is_recalled_is_what_a_plain_dict_holds(steps: list[tuple[str, int]]) -> None:
    requests, answers, floor = ClientRequests(), dict[int, str](), 0
    for step, number in steps:
        if step == "settle":
            requests.settle(number)
            floor = max(floor, number)
        elif number > floor and number not in answers:
            requests.remember(number, f"answer {number}")
            answers[number] = f"answer {number}"
    assert requests.answers == {n: a for n, a in answers.items() if n > floor}
    for number in range(1, 61):
        if number <= floor:
            with pytest.raises(OutcomeUnknown):
                requests.recall(number, "c")
        else:
            assert requests.recall(number, "c") == answers.get(number)


@pytest.mark.parametrize("held", [0, 1, 8, 9, 500])
def test_settling_a_huge_number_costs_no_more_than_what_is_held(held: int) -> None:
    requests = ClientRequests()
    for number in range(1, held + 1):
        requests.remember(number, number)
    requests.remember(1 << 61, "far")
    started = time.process_time()
    requests.settle(1 << 60)
    assert time.process_time() - started < 1.0
    assert requests.answers == {1 << 61: "far"}


# -- the puts of a tag service


@pytest.fixture
def service(tmp_path: Path) -> TagService:
    journal = FileJournal(tmp_path / "journal", "plane", 1)
    service = TagService(TagStore(1), journal, on_destroy=lambda: None, clock=lambda: 0.0)
    service.store.changed = None  # there is no loop here, and nobody who waits
    return service


def put_tags(
    service: TagService,
    number: int,
    key: str,
    *,
    settled: int = 0,
    flags: int = 0,
    client: str = "c",
) -> int:
    meta = PutMeta("train", [key], flags, number, settled, None, None)
    answer = service.putting.put(client, meta.pack(), msgpack.packb({"n": number}), None, "")
    assert isinstance(answer, PutAnswer)
    return answer.revision[1]


def test_a_repeated_put_has_one_effect_and_the_first_answer(service: TagService) -> None:
    assert put_tags(service, 1, "a") == 1
    assert put_tags(service, 2, "a") == 2
    assert put_tags(service, 1, "a", flags=RETRY) == 1
    assert service.store.n == 2
    assert tags_of(service.store, "train", ["a"]) == [{"n": 2}]


def test_a_repeated_put_that_must_be_the_first_is_answered_like_the_first(
    service: TagService,
) -> None:
    assert put_tags(service, 1, "a", flags=IF_ABSENT) == 1
    assert put_tags(service, 1, "a", flags=IF_ABSENT | RETRY) == 1
    with pytest.raises(AlreadyWritten):
        put_tags(service, 2, "a", flags=IF_ABSENT)


def test_a_refused_put_leaves_its_number_free_for_a_repetition(service: TagService) -> None:
    put_tags(service, 1, "a")
    with pytest.raises(AlreadyWritten):
        put_tags(service, 2, "a", flags=IF_ABSENT)
    service.store.apply_clear("train", ["a"], 0.0)
    assert put_tags(service, 2, "a", flags=IF_ABSENT) == 3


def test_a_settled_number_is_never_put_again(service: TagService) -> None:
    put_tags(service, 1, "a")
    put_tags(service, 5, "b", settled=4)
    for number in (1, 3):
        with pytest.raises(OutcomeUnknown) as error:
            put_tags(service, number, "late", flags=RETRY)
        assert error.value.request_id == f"c/{number}"
    assert service.store.n == 2
    assert put_tags(service, 1, "late", client="another") == 3  # numbers are a client's own


def test_a_put_whose_answer_could_not_be_kept_is_not_made(service: TagService) -> None:
    open_number = 1  # never answered, so that nothing above it is settled
    for number in range(open_number + 1, MAX_OPEN + open_number + 1):
        service.store.client("c").remember(number, "answered")
    before = service.store.counts(), service.journal.nbytes
    with pytest.raises(DataplaneError, match="settle") as error:
        put_tags(service, MAX_OPEN + 10, "a")
    assert isinstance(error.value, RequestError)  # which says that nothing was changed
    assert (service.store.counts(), service.journal.nbytes) == before
    assert put_tags(service, MAX_OPEN + 10, "a", settled=MAX_OPEN) == 1


# -- the numbers of a client


def test_numbers_are_settled_up_to_the_oldest_that_is_open() -> None:
    numbers = RequestNumbers()
    assert [numbers.begin() for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
    numbers.end(2)
    assert numbers.begin() == (4, 0)
    numbers.end(1)
    assert numbers.begin() == (5, 2)
    for number in (3, 4, 5):
        numbers.end(number)
    assert numbers.begin() == (6, 5)


def test_a_request_of_unknown_outcome_is_not_settled_until_it_is_told() -> None:
    numbers = RequestNumbers()
    for number in (1, 2):
        assert numbers.begin() == (number, number - 1)
        if number == 2:
            numbers.keep(number)
        numbers.end(number)
    assert numbers.begin() == (3, 1)
    numbers.end(3)
    assert numbers.begin() == (4, 1)
    numbers.end(4)
    numbers.told(2)
    assert numbers.begin() == (5, 4)
    numbers.told(2)  # once more does no harm


def test_requests_of_unknown_outcome_are_kept_for_a_while_only() -> None:
    numbers = RequestNumbers()
    for number in range(1, MAX_UNKNOWN + 3):  # as many as are kept, and two more
        assert numbers.begin()[0] == number
        numbers.keep(number)
        numbers.end(number)
    number, settled = numbers.begin()
    numbers.end(number)
    assert settled == 2  # the oldest two are given up
    for _ in range(UNKNOWN_FOR + MAX_UNKNOWN + 2):
        number, settled = numbers.begin()
        numbers.end(number)
    assert settled == number - 1


def test_of_clients_that_are_long_gone_so_many_are_remembered() -> None:
    """By their numbers only: one that comes again has not got a second effect."""
    store = TagStore(1)
    for number in range(MAX_GONE + 10):
        store.client(f"c{number}").remember(3, "three")
        store.forget_client(f"c{number}")
    store.client("never asked")
    store.forget_client("never asked")
    store.forget_client("never seen")
    assert store.requests == {}
    assert len(store.gone) == MAX_GONE
    with pytest.raises(OutcomeUnknown):
        store.client(f"c{MAX_GONE}").recall(3, f"c{MAX_GONE}/3")
    assert store.client(f"c{MAX_GONE}").recall(4, f"c{MAX_GONE}/4") is None
    assert len(store.gone) == MAX_GONE - 1  # it is one that is here
    assert store.client("c0").floor == 0
