"""Whether the main job learned, by the summaries that runs left.

    python -m tests.learning runs/quickstart [--control runs/control]

A run learns if its held-out reward, sampled, goes from at most 0.4 to at least 0.85, and greedy to
at least 0.9. A control, whose advantages were given to other rows, must gain less than 0.05.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def wrong_of_run(summary: Mapping[str, float]) -> Iterator[str]:
    """What speaks against a run having learned."""
    bounds = {
        "sampled_after_warmup": (0.0, 0.4),
        "sampled_final": (0.85, 1.0),
        "greedy_final": (0.9, 1.0),
        "rows_left": (0, 0),
    }
    for name, (least, most) in bounds.items():
        if not least <= summary[name] <= most:
            yield f"{name} is {summary[name]:.3f}, not from {least} to {most}"


def wrong_of_control(summary: Mapping[str, float]) -> Iterator[str]:
    """What speaks against a control having learned nothing."""
    gain = summary["sampled_final"] - summary["sampled_after_warmup"]
    if gain >= 0.05:
        yield f"the control gained {gain:.3f}: reward is not what teaches"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--control", type=Path, action="append", default=[])
    options = parser.parse_args()
    wrong: list[str] = []
    for check, folders in ((wrong_of_run, options.runs), (wrong_of_control, options.control)):
        for folder in folders:
            summary = json.loads((folder / "summary.json").read_text())
            found = list(check(summary))
            wrong += [f"{folder}: {problem}" for problem in found]
            names = ("sampled_after_warmup", "sampled_final", "greedy_final", "wall_s")
            told = "  ".join(f"{name} {summary[name]:.3f}" for name in names)
            print(f"{folder}: {'as it should be' if not found else 'WRONG'}  {told}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
