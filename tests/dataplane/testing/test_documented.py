"""What docs/testing.md shows is what happens, and the plugin gives what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SNIPPETS: list[str] = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/testing.md").read_text(), re.MULTILINE | re.DOTALL
)


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True, text=True, timeout=120, cwd=folder, env=environment(folder),
    )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    import os
    import tempfile

    paths = [str(ROOT), *filter(None, sys.path)]
    # Not pytest's own folder: a path of a unix socket has at most 107 bytes.
    runtime = tempfile.mkdtemp(prefix="dataplane-")
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DATAPLANE_RUNTIME_DIR": runtime}
    return {name: value for name, value in kept.items() if not name.startswith("PYTEST_")}


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_snippet_runs(number: int, tmp_path: Path) -> None:
    code = SNIPPETS[number]
    path = tmp_path / "test_snippet.py"
    path.write_text(code)
    if "def test_" in code:
        ran = run(
            "-m", "pytest", "-q", "-p", "no:asyncio",
            "--rootdir", str(tmp_path), str(path), folder=tmp_path,
        )  # fmt: skip
        assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    else:
        ran = run(str(path), folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 4


def test_the_plugin_gives_planes_and_proxies_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test_plugin.py"
    path.write_text("""
import dataplane, pytest

planes = []

@pytest.mark.parametrize("n", [1, 2])
def test_each_has_its_own(dataplane_plane, n):
    planes.append(dataplane_plane)
    dataplane.kv_put("A", "p", None, {"n": n})
    assert [tags["n"] for tags in dataplane_plane.client.kv_list("p").tags] == [n]

def test_nothing_is_left():
    assert len({p.name for p in planes}) == 2
    assert not any(p.folders.runtime.exists() or p.folders.segments.exists() for p in planes)
    with pytest.raises(dataplane.PlaneLost):
        dataplane.kv_list("p")

def test_proxies(dataplane_plane, fault_proxy):
    one, two = fault_proxy(dataplane_plane.joined.tags), fault_proxy(dataplane_plane.joined.tags)
    assert one.address != two.address
    proxies.append(one)

proxies = []

def test_proxies_are_closed():
    assert proxies[0]._closed
""")
    ran = run(
        "-m", "pytest", "-q", "-p", "no:asyncio",
        "--rootdir", str(tmp_path), str(path), folder=tmp_path,
    )  # fmt: skip
    assert "5 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'ray', 'numpy', 'pyarrow', 'uvloop', 'dataplane.client.sync'}"
    code = f"import sys, dataplane.testing.plugin; print({heavy} & set(sys.modules))"
    ran = run("-c", code, folder=tmp_path)
    assert ran.stdout.strip() == "set()", ran.stdout + ran.stderr
