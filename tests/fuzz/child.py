"""One target under libFuzzer, in a process of its own that ends with it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from tests.fuzz.memory import Watch
from tests.fuzz.target import MiB, Target

SLACK_BYTES: Final = 4096 * MiB
"""Address space beyond the limit: arenas of threads, the fuzzer's own. What was asked for and never
touched is no resident memory, and is refused by this."""
TIMEOUT_S: Final = 60
"""Of one input. An honest one takes milliseconds; the machine may stand still for a while."""


class Stint(NamedTuple):
    """How long a target is fuzzed, and where its files lie."""

    seed: int
    runs: int
    """0 for no limit."""
    seconds: int
    """0 for no limit."""
    corpus: Path
    """Inputs that lead somewhere new; they are added to."""
    seeds: Path
    artifacts: Path
    """Where an input is left that is a finding."""
    log: Path


def fuzz(target: Target, stint: Stint, atheris: Any) -> NoReturn:
    """Fuzz it; exit status 0 if nothing was found. Never returns: the process is libFuzzer's."""
    fd = os.open(stint.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    gc.collect()
    gc.freeze()
    watches: list[Watch] = []
    pages, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    size = resource.getpagesize()
    most = pages * size + 2 * target.limit_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for data in target.seeds():
        with contextlib.suppress(Exception):
            target(data)  # what is imported or made once is no input's fault
    highest = stint.artifacts / "highest"

    def one_input(data: bytes) -> None:
        if not watches:  # from here on; what the fuzzer takes when it begins is not the target's
            watches.append(Watch(target.limit_bytes))
        watch = watches[0]
        target(data)
        before = watch.highest
        watch.check()
        if watch.highest > before:
            highest.write_text(str(watch.highest))

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.mutate is not None and chance.random() < 0.75:
            try:
                changed = target.mutate(data, chance)
            except Exception:  # a change that makes no input of this format
                changed = b""
            if 0 < len(changed) <= max_size:
                return changed
        return atheris.Mutate(data, max_size)

    arguments = [
        "fuzz",
        str(stint.corpus),
        str(stint.seeds),
        f"-seed={stint.seed}",
        f"-artifact_prefix={stint.artifacts}/",
        f"-max_len={target.max_len}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={(resident * size + 2 * target.limit_bytes + SLACK_BYTES) // MiB}",
        "-print_final_stats=1",
        "-detect_leaks=0",
        "-reload=0",
        "-len_control=0",
    ]
    if stint.runs:
        arguments.append(f"-runs={stint.runs}")
    if stint.seconds:
        arguments.append(f"-max_total_time={stint.seconds}")
    more = {} if target.mutate is None else {"custom_mutator": mutated}
    atheris.Setup(arguments, one_input, **more)
    atheris.Fuzz()
    sys.exit(0)
