"""NeMo-RL's data plane on the drop-in.

    python -m tests.interop.nemo [--nemo CHECKOUT] [--against peer]

Three parts: its adapter's call sequences as they are written down here; with a checkout (or the
variable NEMO_RL), its own tests as they are, and those of its in-memory client on its adapter.
The exit code is 0 only if all that were asked for passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.interop.child import MISSING, Outcome, pytest_run
from tests.interop.nemo import contract, loading
from tests.interop.sides import SIDES, environment, ray_cluster

ROOT = Path(__file__).resolve().parents[3]


def run_sequences(variables: Mapping[str, str], within_s: float = 240.0) -> dict[str, str]:
    """What went wrong in each case of sequences.py, which runs in a process with these variables;
    nothing for those that passed."""
    path = [variables.get("PYTHONPATH", ""), str(ROOT)]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tests.interop.nemo.sequences"],
        env={**variables, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True, text=True, timeout=within_s, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"the sequences did not run:\n{ran.stdout}{ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def run_contract(
    side: str, checkout: Path, variables: Mapping[str, str], *, through_adapter: bool
) -> dict[str, Outcome]:
    """What became of NeMo-RL's tests: `file::test` -> outcome."""
    files = contract.THROUGH_ADAPTER if through_adapter else contract.AS_WRITTEN
    folder = checkout / contract.FOLDER
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise SystemExit(f"{checkout} is no checkout of NeMo-RL: it lacks {missing[0]}")
    left_out = ["mooncake_cpu", *(contract.SLOW if through_adapter else [])]
    outcomes = pytest_run(
        side,
        checkout,
        [f"{contract.FOLDER}/{file}" for file in files],
        {
            **variables,
            loading.CHECKOUT: str(checkout),
            loading.THROUGH: "1" if through_adapter else "",
        },
        options=[
            "--import-mode=importlib", "--confcutdir", str(folder),
            "-k", " and ".join(f"not {name}" for name in left_out),
        ],
        prepare=str(Path(loading.__file__).resolve()),
    )  # fmt: skip
    return {name.removeprefix(f"{contract.FOLDER}/"): found for name, found in outcomes.items()}


def judge(
    files: Mapping[str, int], outcomes: Mapping[str, Outcome], aside: Mapping[str, str]
) -> tuple[list[str], bool]:
    """The lines that say how each file did, and whether all of them did well.

    A file does well if as many of its tests passed as are known, and none failed but those that
    are set aside.
    """
    lines: list[str] = []
    good = True
    for file, known in files.items():
        tests = {name: o for name, o in outcomes.items() if name.split("::")[0] == file}
        counted = {name: o for name, o in tests.items() if name not in aside}
        passed = sum(outcome.passed for outcome in counted.values())
        well = passed >= known and passed == len(counted)
        good &= well
        lines.append(f"  {'passed' if well else 'FAILED':8} {passed:3} of {known:3} {file}")
        lines += [
            f"           {outcome.outcome}: {name}: {_first(outcome.why)}"
            for name, outcome in counted.items()
            if not outcome.passed
        ]
    for name, why in aside.items():
        if name.split("::")[0] in files:
            outcome = outcomes.get(name, MISSING).outcome
            lines.append(f"  not counted: {name}: {why} ({outcome})")
    return lines, good


def _first(text: str) -> str:
    return next(iter(text.splitlines()), "")[:200]


def _print(title: str, lines: Iterable[str]) -> None:
    print(title)
    for line in lines:
        print(line)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interop.nemo")
    parser.add_argument("--nemo", type=Path, default=os.environ.get(loading.CHECKOUT) or None)
    parser.add_argument("--against", choices=SIDES, default="drop-in", help="which package")
    given = parser.parse_args(arguments)
    good = True
    with ray_cluster(environment(given.against)) as variables:
        wrong = run_sequences(variables)
        good &= not any(wrong.values())
        _print(
            f"call sequences: {sum(not why for why in wrong.values())} of {len(wrong)} passed",
            (f"  {'FAILED' if why else 'passed':8} {name}\n{why}".rstrip()
             for name, why in wrong.items()),
        )  # fmt: skip
        if given.nemo is None:
            print(f"no checkout of NeMo-RL: its own tests did not run (--nemo, {loading.CHECKOUT})")
        else:
            checkout = given.nemo.resolve()
            found = run_contract(given.against, checkout, variables, through_adapter=False)
            lines, well = judge(contract.AS_WRITTEN, found, contract.NEEDS_MORE)
            _print("its tests as written", lines)
            good &= well
            found = run_contract(given.against, checkout, variables, through_adapter=True)
            aside = {**contract.NEEDS_MORE, **contract.IN_MEMORY_ONLY}
            lines, well = judge(contract.THROUGH_ADAPTER, found, aside)
            _print("tests of its in-memory client, through its adapter", lines)
            good &= well
    print("all passed" if good else "NOT all passed", f"({given.against})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
