"""Every decoder against hundreds of inputs that nobody sends: nothing leaves it but refusals.

`make fuzz` does the same for ten minutes each. What was ever found is replayed by test_replay.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = 600
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed; there is none for this Python",
)

BROKEN = """
import sys
from pathlib import Path
import atheris
from tests.fuzz.running import run_target
from tests.fuzz.target import MiB, Target

def crash(data):
    if data[:1] == b"X":
        raise KeyError(data)
    if data[:1] == b"Y":
        raise ValueError(data)

def swell(data):
    bytearray(b"x" * ((48 if len(data) > 3 else 1) << 20))

def claim(data):
    import numpy
    numpy.empty(1 << (45 if len(data) > 3 else 4), numpy.uint8)

targets = {
    "crash": Target("crash", crash, lambda: [b"W", b"V"], (ValueError,)),
    "swell": Target("swell", swell, lambda: [b"W"], (), limit_bytes=16 * MiB),
    "claim": Target("claim", claim, lambda: [b"W"], (), limit_bytes=16 * MiB),
    "well": Target("well", lambda data: None, lambda: [b"W"], ()),
}
folder = Path(sys.argv[1])
for name, target in targets.items():
    outcome = run_target(target, atheris, seed=1, runs=5000, failed=folder)
    print(name, outcome.is_well, *[path.read_bytes()[:1] for path in outcome.found], flush=True)
    print(outcome.said[:2000], file=sys.stderr)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_nothing_leaves_a_decoder_but_a_refusal(tmp_path: Path) -> None:
    ended = run("-m", "tests.fuzz", "--runs", str(RUNS), "--seed", "1", "--failed", str(tmp_path))
    print(ended.stdout)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def test_what_a_broken_decoder_does_is_found(tmp_path: Path) -> None:
    ended = run("-c", BROKEN, str(tmp_path))
    lines = ended.stdout.splitlines()
    assert lines[0] == "crash False b'X'", f"{ended.stdout}\n{ended.stderr}"
    assert lines[1].startswith("swell False"), ended.stderr
    assert lines[2].startswith("claim False"), ended.stderr
    assert lines[3] == "well True"
    assert {path.parent.name for path in tmp_path.glob("*/*")} == {"crash", "swell", "claim"}
