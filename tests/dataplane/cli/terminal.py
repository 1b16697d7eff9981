"""A person at a terminal: reads what a command asks and answers it."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

from tests.dataplane.cli.conftest import COMMAND, TIMEOUT_S, Operator, Said
from tests.deadline import eventually


class Asked:
    """A command that waits for an answer."""

    def __init__(self, process: subprocess.Popen[str], master: int) -> None:
        self._process = process
        self._master = master

    def answer(self, text: str) -> Said:
        """Type it, and wait until the command has ended."""
        os.write(self._master, text.encode())
        out, err = self._process.communicate(timeout=TIMEOUT_S)
        return Said(self._process.returncode, out, err)


@contextmanager
def asked(operator: Operator, *words: str) -> Generator[Asked]:
    """A command at a terminal, once it has asked."""
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, *words], stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=operator.variables(),
        )  # fmt: skip
        os.close(slave)
        try:
            assert process.stderr is not None
            fd = process.stderr.fileno()
            said = ""

            def has_asked() -> bool:
                nonlocal said
                said += os.read(fd, 65536).decode()
                return said.endswith("[y/N] ")

            eventually(has_asked, "it asks", within_s=TIMEOUT_S)
            yield Asked(process, master)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    finally:
        os.close(master)
