"""Every input that was ever a finding, and every seed: refused or taken, within its memory."""

from __future__ import annotations

import logging
import socket
import time
import tracemalloc
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from dataplane.checkpoint import heads
from dataplane.client.connection import Connection
from tests.fuzz import wire
from tests.fuzz.running import FAILED, kept
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """What is refused is logged; and the loop of all targets ends with them."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
    wire.close_loop()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_found_once_are_refused_or_taken(name: str) -> None:
    target = TARGETS[name]
    inputs = [*target.seeds(), *kept(name)]
    for data in inputs:
        target(data)  # what is made once, such as templates of errors, is made
    pool = pa.default_memory_pool()
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before, arrow = tracemalloc.get_traced_memory()[0], pool.bytes_allocated()
            target(data)
            took = tracemalloc.get_traced_memory()[1] - before
            assert took + pool.bytes_allocated() - arrow <= 2 * target.limit_bytes, data[:200]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TARGETS)
def test_some_seeds_are_what_the_real_writers_write(name: str) -> None:
    """Otherwise the fuzzer would begin at a closed door."""
    target = TARGETS[name]
    taken = 0
    for data in target.seeds():
        try:
            target.run(data)
        except target.refusals:
            continue
        taken += 1
    assert taken


def test_what_was_kept_is_of_targets_that_there_are() -> None:
    there = {path.name for path in FAILED.iterdir()} if FAILED.is_dir() else set[str]()
    assert there <= set(TARGETS)


@pytest.mark.parametrize("about", [{3: [[1]]}, {3: [b"key"], 2: [[0]], 4: 0}])
def test_a_parquet_footer_with_lists_for_names_or_encodings_is_refused(about: Any) -> None:
    with pytest.raises(heads.Malformed):
        list(heads._chunks(0, {1: [{3: about}], 3: 0}))


def test_a_part_of_a_second_that_rounds_to_one_is_no_error() -> None:
    """The kernel takes no million microseconds; a call with whole seconds left failed at times."""
    ours, theirs = socket.socketpair()
    with ours, theirs, unittest.mock.patch.object(time, "monotonic", return_value=0.0):
        Connection(ours)._arm(30 - 2e-7)
