"""Recycled memory: never two owners at once, the same pages again, no more at rest than said."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.core import Core, Joined
from dataplane.client.memory import SMALL_BYTES, Bytes, Recycler, size_class
from dataplane.config import Config
from dataplane.wire.address import Address

MIB = 1 << 20
SIZE = 256 << 10


def address(buffer: Any) -> int:
    return buffer.__array_interface__["data"][0]


HOLDERS: dict[str, Callable[[Bytes], Any]] = {
    "the buffer": lambda b: b,
    "a slice": lambda b: b[100:200],
    "a slice of a slice of a slice": lambda b: b[8:][8:][: SIZE // 2],
    "an array of another dtype": lambda b: b[64:1024].view(np.float32),
    "an array of another shape": lambda b: b[: SIZE // 2].reshape(2, -1).T,
    "a memoryview": lambda b: memoryview(b)[10:20],
    "an array over a memoryview": lambda b: np.frombuffer(memoryview(b), np.int16, count=8),
    "a tensor": torch.from_numpy,
    "a tensor of a slice": lambda b: torch.from_numpy(b[4096:8192]),
    "a tensor as another dtype": lambda b: torch.from_numpy(b).view(torch.bfloat16),
    "a slice of a tensor": lambda b: torch.from_numpy(b).view(torch.int64)[5:6],
    "a row of an unbound tensor": lambda b: (
        torch.from_numpy(b[: SIZE // 2]).view(8, -1).unbind()[7]
    ),
    "a chunk of a split tensor": lambda b: torch.from_numpy(b).split(1000)[3],
    "a strided tensor": lambda b: torch.from_numpy(b).view(torch.float32)[::7],
    "a nested tensor": lambda b: torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(b).view(torch.float32), torch.tensor([0, 10, len(b) // 4])
    ),
    "a row of a nested tensor": lambda b: torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(b).view(torch.float32), torch.tensor([0, 10, len(b) // 4])
    ).unbind()[1],
    "a storage": lambda b: torch.from_numpy(b).untyped_storage(),
    "an array of a tensor": lambda b: torch.from_numpy(b).view(torch.int32).numpy()[3:],
    "a tensor that came through dlpack": lambda b: torch.from_dlpack(torch.from_numpy(b)),
    "a tensor of a buffer": lambda b: torch.frombuffer(b, dtype=torch.uint8, count=100),
}


def content(holder: Any) -> set[int]:
    """The values of the bytes that a holder lies over."""
    if isinstance(holder, torch.UntypedStorage):
        return set(holder[:1000].tolist())
    if isinstance(holder, torch.Tensor):
        flat = holder.values() if holder.is_nested else holder
        return set(flat.contiguous().view(torch.uint8).flatten().tolist())
    return set(bytes(holder))


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_buffer_is_not_lent_again_while_anything_lies_over_it(
    hold: Callable[[Bytes], Any],
) -> None:
    recycler = Recycler(64 * MIB)
    buffer = recycler.take(SIZE)
    buffer[:] = 7
    place = address(buffer)
    holder = hold(buffer)
    del buffer
    others = [recycler.take(SIZE) for _ in range(4)]
    assert place not in map(address, others)
    for other in others:
        other[:] = 9
    assert content(holder) == {7}
    del holder
    assert address(recycler.take(SIZE)) == place


def test_the_pages_of_a_buffer_that_is_gone_are_used_again_and_again() -> None:
    recycler = Recycler(64 * MIB)
    places = set()
    for _ in range(50):
        tensor = torch.from_numpy(recycler.take(3 * MIB))[5:]
        places.add(tensor.data_ptr())
        del tensor
    assert len(places) == 1
    assert recycler.resting_bytes == size_class(3 * MIB)


def test_near_sizes_share_pages_and_a_buffer_has_the_size_asked_for() -> None:
    recycler = Recycler(64 * MIB)
    first = recycler.take(MIB + 1)
    place = address(first)
    del first
    second = recycler.take(MIB + MIB // 4)
    assert address(second) == place
    assert len(second) == MIB + MIB // 4
    assert second.flags.writeable
    assert second.dtype == np.uint8


@pytest.mark.parametrize("nbytes", [0, 1, SMALL_BYTES - 1])
def test_small_buffers_are_left_to_the_allocator(nbytes: int) -> None:
    recycler = Recycler(64 * MIB)
    buffer = recycler.take(nbytes)
    assert (len(buffer), buffer.base) == (nbytes, None)
    del buffer
    assert recycler.resting_bytes == 0


def test_without_a_limit_nothing_rests() -> None:
    recycler = Recycler(0)
    buffer = recycler.take(4 * MIB)
    buffer[:] = 1
    del buffer
    assert recycler.resting_bytes == 0
    assert len(recycler.take(4 * MIB)) == 4 * MIB


def test_no_more_than_the_limit_rests_even_if_nothing_is_taken_any_more() -> None:
    recycler = Recycler(10 * MIB)
    buffers = [recycler.take(MIB) for _ in range(30)]
    before = _resident_bytes()
    for buffer in buffers:
        buffer[:] = 1
    assert _resident_bytes() - before > 25 * MIB
    del buffer
    while buffers:
        buffers.pop()
        assert recycler.resting_bytes <= 10 * MIB
    assert recycler.resting_bytes == 10 * MIB
    assert _resident_bytes() - before < 20 * MIB


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_over_the_limit_the_largest_goes_first_and_a_larger_one_is_not_kept() -> None:
    recycler = Recycler(10 * MIB)
    sizes = [4 * MIB, MIB, 5 * MIB, MIB]
    buffers = [recycler.take(size) for size in sizes]
    places = [address(buffer) for buffer in buffers]
    del buffers[0], buffers[1]  # 4 and 5 MiB rest
    assert recycler.resting_bytes == 9 * MIB
    buffers.pop()
    assert recycler.resting_bytes == 10 * MIB
    buffers.pop()  # the eleventh MiB: the 5 go
    assert recycler.resting_bytes == 6 * MIB
    huge = recycler.take(11 * MIB)
    del huge
    assert recycler.resting_bytes == 6 * MIB
    again = [recycler.take(size) for size in (4 * MIB, MIB, MIB)]
    assert sorted(map(address, again)) == sorted([places[0], places[1], places[3]])
    assert recycler.resting_bytes == 0


@given(st.integers(SMALL_BYTES, 1 << 40))
def test_a_size_class_wastes_a_quarter_at_most(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= nbytes + max(4096, nbytes // 4)
    assert size % 4096 == 0
    assert size_class(size) == size  # what is returned is found again by its own size
    assert size_class(nbytes - 1) <= size


@given(st.integers(17, 40))
def test_there_are_four_size_classes_between_powers_of_two(power: int) -> None:
    low = 1 << power
    sizes = {size_class(low + i * (low // 64) + 1) for i in range(64)}
    assert sizes == {low + low // 4, low + low // 2, low + 3 * low // 4, 2 * low}


def test_a_buffer_that_dies_in_a_cycle_comes_back_with_the_cycle() -> None:
    recycler = Recycler(64 * MIB)
    buffer = recycler.take(MIB)
    place = address(buffer)
    cycle: list[Any] = [buffer]
    cycle.append(cycle)
    del buffer, cycle
    gc.collect()
    assert address(recycler.take(MIB)) == place


def test_a_buffer_that_dies_after_its_recycler_takes_its_memory_with_it() -> None:
    recycler = Recycler(64 * MIB)
    tensor = torch.from_numpy(recycler.take(MIB))
    del recycler
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * MIB


def test_threads_never_get_each_others_memory_and_the_sum_stays_right() -> None:
    recycler = Recycler(12 * MIB)
    sizes = [SMALL_BYTES + i * 5000 for i in range(40)]
    failures: list[str] = []
    end = time.monotonic() + 1.0

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        held: list[tuple[torch.Tensor, int]] = []
        turn = 0
        try:
            while time.monotonic() < end and not failures:
                turn += 1
                mark = (number * 31 + turn) % 251
                buffer = recycler.take(int(random.choice(sizes)))
                buffer[:] = mark
                held.append((torch.from_numpy(buffer)[100:][50:], mark))
                del buffer
                if len(held) > 5:
                    tensor, mark = held.pop(int(random.integers(len(held))))
                    if int(tensor.min()) != mark or int(tensor.max()) != mark:
                        failures.append(f"thread {number}: someone wrote over {mark}")
                    del tensor
        except Exception as error:
            failures.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    assert 0 < recycler.resting_bytes <= 12 * MIB
    total, taken = recycler.resting_bytes, 0
    again = []
    for size in {size_class(size) for size in sizes}:
        while True:
            before = recycler.resting_bytes
            again.append(recycler.take(size))
            if recycler.resting_bytes == before:
                break
            taken += size
    assert taken == total  # everything that was counted was there
    assert recycler.resting_bytes == 0


def test_a_buffer_may_die_while_its_thread_is_in_the_recycler() -> None:
    recycler = Recycler(64 * MIB)
    buffer = recycler.take(MIB)
    place = address(buffer)
    with recycler._lock:  # as when a collection runs within `take`
        del buffer
    assert address(recycler.take(MIB)) == place


def test_a_forked_childs_client_recycles_for_itself_even_if_a_thread_was_inside() -> None:
    core = Core(Joined("name", "plane", b"secret", Address("/nowhere")), Config())
    inherited = core.recycler
    buffer = inherited.take(MIB)
    with inherited._lock:
        core.new_identity()
        assert core.recycler is not inherited
        assert len(core.recycler.take(MIB)) == MIB
    del buffer
    assert core.recycler.resting_bytes <= size_class(MIB)
