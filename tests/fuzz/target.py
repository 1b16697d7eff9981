"""One decoder as the fuzzer sees it: bytes in, nothing out but the errors that it is to raise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

KiB: Final = 1 << 10
MiB: Final = 1 << 20

Mutate = Callable[[bytes, random.Random], bytes]
Plant = Callable[[bytes, bytes], Iterable[bytes]]


@dataclass(frozen=True)
class Target:
    """A decoder, what it may answer, and what it may take."""

    name: str
    run: Callable[[bytes], object]
    """Decodes, and then uses what came of it as its callers do."""
    seeds: Callable[[], Iterable[bytes]]
    """Real inputs, made by the real writers, and lies about sizes. Always the same ones."""
    refusals: tuple[type[Exception], ...]
    """What it may raise; anything else that leaves it is a finding."""
    limit_bytes: int = 8 * MiB
    """Memory that an input of `max_len` may take, by what the format allows it; a finding is more
    than twice of it."""
    max_len: int = 4 * KiB
    mutate: Mutate | None = None
    """Changes an input so that its checksums and lengths are right again."""
    plant: Plant | None = None
    """The input with some bytes in place of each of its parts, as right as before otherwise."""

    def __call__(self, data: bytes) -> None:
        try:
            self.run(data)
        except self.refusals:
            pass

    def planted(self, payload: bytes) -> Iterable[bytes]:
        """Inputs that carry some bytes wherever the format has room for bytes."""
        yield payload
        for seed in self.seeds():
            yield seed + payload
            if self.plant is not None:
                yield from self.plant(seed, payload)
