"""One pytest run of somebody else's tests on one side; a program of its own, see `pytest_run`.

It is started by path with `python -P`, so that neither a package `tests` nor a `transfer_queue`
that lies in the checkout comes before the one that is meant.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORSE = ["passed", "skipped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of one test: of several runs of it, the worst."""

    outcome: str
    why: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


MISSING = Outcome("missing", "no such test ran")


def pytest_run(
    side: str,
    checkout: Path,
    paths: Sequence[str],
    variables: Mapping[str, str],
    *,
    options: Sequence[str] = (),
    prepare: str = "",
    within_s: float = 900.0,
) -> dict[str, Outcome]:
    """What became of the tests in these files of a checkout: `file::Class::test` to outcome.

    Runs with other parameters count as one test. `prepare` names a file whose `prepare()` runs
    before pytest does.
    """
    with tempfile.TemporaryDirectory(prefix="interop-") as folder:
        results = Path(folder) / "results.json"
        config = Path(folder) / "pytest.ini"
        config.write_text("[pytest]\n")
        # fmt: off
        command = [
            sys.executable, "-P", str(Path(__file__).resolve()), side, str(results), prepare,
            "-q", "-c", str(config), "--rootdir", str(checkout), "-p", "no:cacheprovider",
            "--timeout", "180", "--tb=short", "-o", "asyncio_mode=auto",
            *options, *(str(checkout / path) for path in paths),
        ]
        # fmt: on
        try:
            ran = subprocess.run(
                command, cwd=folder, env=dict(variables), capture_output=True, text=True,
                timeout=within_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{list(paths)} did not end within {within_s:g} s") from error
        if not results.exists():
            raise RuntimeError(
                f"{list(paths)} did not run:\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}"
            )
        found: dict[str, list[str]] = json.loads(results.read_text())
        return {name: Outcome(*rest) for name, rest in found.items()}


class _Recorder:
    """A pytest plugin that keeps the worst outcome of each test function."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "passed" and report.when != "call":
            return
        self._note(report.nodeid.split("[")[0], report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._note(report.nodeid or "collection", report)

    def _note(self, name: str, report: Any) -> None:
        known = self.found.get(name, ("passed", ""))
        if name not in self.found or _WORSE.index(report.outcome) > _WORSE.index(known[0]):
            self.found[name] = (report.outcome, _reason(report))


def _reason(report: Any) -> str:
    """The one line that says why a test failed or was skipped."""
    text = report.longrepr
    if isinstance(text, tuple):
        return str(text[-1])
    crash = getattr(text, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:600]
    return str(text)[-600:] if text else ""


def _main() -> int:
    import pytest

    side, results, prepare, *options = sys.argv[1:]
    _check(side)
    if prepare:
        _load(prepare).prepare()
    recorder = _Recorder()
    code = int(pytest.main(options, plugins=[recorder]))
    # 2 and more: nothing ran, and the output says why.
    if code in (0, 1) or recorder.found:
        Path(results).write_text(json.dumps(recorder.found))
    return code


def _load(path: str) -> Any:
    """The module in a file, which may lie outside of every path."""
    spec = importlib.util.spec_from_file_location("prepared", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(side: str) -> None:
    """As `sides.check_imported`, which this program does not have on its path."""
    import transfer_queue

    from dataplane.compat import folder

    ours = str(transfer_queue.__file__).startswith(folder() + os.sep)
    if ours != (side == "drop-in"):
        raise ImportError(f"transfer_queue comes from {transfer_queue.__file__}, not the {side}")


if __name__ == "__main__":
    sys.exit(_main())
