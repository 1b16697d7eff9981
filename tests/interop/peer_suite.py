"""TransferQueue's own tests of its public interface, run on the drop-in from a checkout of it.

    python -m tests.interop.peer_suite CHECKOUT [--only GROUP] [--against peer]

Prints what became of every test by its name. The exit code is 0 only if all of them passed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.interop.child import MISSING, Outcome, pytest_run
from tests.interop.peer_names import ELSEWHERE, GROUPS, Names
from tests.interop.sides import SIDES, Side, environment, ray_cluster

Outcomes = Mapping[str, Outcome]


def run(checkout: Path, groups: Mapping[str, Names], side: Side) -> dict[str, Outcome]:
    """What became of the tests in all files that these groups name, one process for each file."""
    files = list(dict.fromkeys(file for names in groups.values() for file in names))
    missing = [file for file in files if not (checkout / file).is_file()]
    if missing:
        raise SystemExit(f"{checkout} is no checkout of TransferQueue: it lacks {missing[0]}")
    outcomes: dict[str, Outcome] = {}
    with ray_cluster(environment(side)) as variables:
        for file in files:
            outcomes |= pytest_run(side, checkout, [file], variables)
    return outcomes


def report(groups: Mapping[str, Names], outcomes: Outcomes) -> Iterator[str]:
    """The table: group by group, each test by name, and the counts."""
    for group, names in groups.items():
        yield f"{group}: {_count(names, outcomes)}"
        for file, tests in names.items():
            yield f"  {file}"
            for test in tests:
                found = _found(file, test, outcomes)
                yield f"    {found.outcome:8} {test}"
                if not found.passed and found.why:
                    yield f"             {found.why.splitlines()[0][:160]}"
    asked = {file for names in groups.values() for file in names}
    for name, why in ELSEWHERE.items():
        if name.split("::")[0] in asked:
            yield f"not counted: {name}: {why} ({outcomes.get(name, MISSING).outcome})"
    known = {
        f"{file}::{test}" for names in GROUPS.values() for file in names for test in names[file]
    }
    for name in sorted(outcomes.keys() - known - ELSEWHERE.keys()):
        yield f"not known: {name} ({outcomes[name].outcome}): {outcomes[name].why[:400]}"


def passed(groups: Mapping[str, Names], outcomes: Outcomes) -> bool:
    """Whether every test of the groups ran and passed."""
    return all(
        _found(file, test, outcomes).passed
        for names in groups.values()
        for file, tests in names.items()
        for test in tests
    )


def _found(file: str, test: str, outcomes: Outcomes) -> Outcome:
    return outcomes.get(f"{file}::{test}", MISSING)


def _count(names: Names, outcomes: Outcomes) -> str:
    tests = [(file, test) for file, some in names.items() for test in some]
    good = sum(_found(file, test, outcomes).passed for file, test in tests)
    return f"{good} of {len(tests)} passed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interop.peer_suite")
    parser.add_argument("checkout", type=Path, help="a checkout of TransferQueue")
    parser.add_argument("--only", choices=list(GROUPS), help="one group instead of all")
    parser.add_argument("--against", choices=SIDES, default="drop-in", help="which package")
    given = parser.parse_args(arguments)
    groups = {given.only: GROUPS[given.only]} if given.only else GROUPS
    outcomes = run(given.checkout.resolve(), groups, given.against)
    for line in report(groups, outcomes):
        print(line)
    good = passed(groups, outcomes)
    print("all passed" if good else "NOT all passed", f"({given.against})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
