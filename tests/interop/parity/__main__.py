"""Runs both sides and prints the table of differences; ends with 1 if it is not the one expected.

`python -m tests.interop.parity [CASES]` takes the beginning of the names of the cases to run.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.interop.parity.compare import broken, differences
from tests.interop.parity.differences import DIFFERENCES
from tests.interop.parity.side import PEER_VERSION, SIDES, answers


def main(only: str = "") -> int:
    peer, dropin = (answers(side, only=only) for side in SIDES)
    found = differences(peer, dropin)
    counts = Counter(name.partition("/")[0] for name in peer)
    print(f"{len(peer)} cases against TransferQueue {PEER_VERSION}, {len(found)} differ")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    for name, lines in found.items():
        print(f"\n{name}: {DIFFERENCES.get(name, 'NOT IN THE TABLE')}")
        for line in lines:
            print(f"    {line}")
    alike = [name for name in DIFFERENCES if name in peer and name not in found]
    for name in alike:
        print(f"\n{name}: IN THE TABLE, BUT ALIKE ({DIFFERENCES[name]})")
    for name, where in broken(peer).items():
        print(f"\n{name}: BROKEN ON THE PEER\n{where}")
    wrong = bool(alike or broken(peer) or set(found) - set(DIFFERENCES))
    print("\nnot the expected table" if wrong else "\nall as expected")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
