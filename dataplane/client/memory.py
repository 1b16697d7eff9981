"""Memory for results, used again once the last tensor over it is gone.

The first touch of a fresh page costs several times the copy that fills it, so a reader that gets
a batch every step should not get fresh pages every step. Buffers come back by themselves: each is
an array that tensors keep alive, and its end returns the pages here.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 64 << 10
"""Below this the allocator's own reuse is as good."""
HUGE_BYTES = 4 << 20
"""From here on huge pages make the first touch cheap where the kernel grants them."""


class Recycler:
    """Buffers by size class, at most `limit_bytes` of them at rest. For any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.resting_bytes = 0
        self._resting: dict[int, deque[mmap.mmap]] = {}
        # Guards the shelf. A finalizer never waits for it: it runs wherever the last tensor
        # dies, within this very lock too.
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()
        self._lent: dict[int, weakref.ref[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """A writable buffer of exactly this size; its content is arbitrary."""
        if nbytes < SMALL_BYTES or not self.limit_bytes:
            return np.empty(nbytes, np.uint8)
        size = size_class(nbytes)
        pages = None
        with self._lock:
            self._shelve()
            resting = self._resting.get(size)
            if resting:
                pages = resting.pop()
                self.resting_bytes -= size
        if pages is None:
            pages = _fresh(size)
        # numpy keeps this very array as the base of every view, since its own base is no array.
        buffer = np.frombuffer(pages, np.uint8, count=nbytes)
        number = id(pages)

        def ended(_: Any, pages: mmap.mmap = pages, number: int = number) -> None:
            self._lent.pop(number, None)
            self._returned.append(pages)
            if self._lock.acquire(blocking=False):
                try:
                    self._shelve()
                finally:
                    self._lock.release()

        self._lent[number] = weakref.ref(buffer, ended)
        return buffer

    def _shelve(self) -> None:
        """Put away what came back; let go of what is over the limit. The lock is held."""
        while True:
            try:
                pages = self._returned.popleft()
            except IndexError:
                return
            size = len(pages)
            if size > self.limit_bytes:
                continue
            self._resting.setdefault(size, deque()).append(pages)
            self.resting_bytes += size
            while self.resting_bytes > self.limit_bytes:
                largest = max((s for s, d in self._resting.items() if d), default=0)
                if not largest:
                    break
                self._resting[largest].popleft()
                self.resting_bytes -= largest


def size_class(nbytes: int) -> int:
    """The next of four sizes between powers of two, so that near sizes share buffers."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 3))
    return (nbytes + step - 1) // step * step


def _fresh(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: only slower
    return pages
