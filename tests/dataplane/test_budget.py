"""What a value store may take: the least of its setting, its mount and its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataplane.errors import InvalidRequest
from dataplane.values.budget import MIN_SEGMENT_BYTES, Budget, shared_memory_budget

MIB = 1 << 20
NO_CGROUP = {"cgroup_root": "/nonexistent", "membership": "/nonexistent"}


def test_the_setting_counts_when_it_is_the_least(tmp_path: Path) -> None:
    assert shared_memory_budget(tmp_path, 1 << 30, **NO_CGROUP) == Budget(1 << 30, 64 * MIB)
    assert shared_memory_budget(tmp_path, 100 * MIB, **NO_CGROUP) == Budget(100 * MIB, 25 * MIB)
    assert shared_memory_budget(tmp_path, 5 * MIB, **NO_CGROUP) == Budget(5 * MIB, 4 * MIB)


@pytest.mark.parametrize("setting", [0, -1, MIN_SEGMENT_BYTES - 1])
def test_a_setting_under_one_segment_is_refused(tmp_path: Path, setting: int) -> None:
    with pytest.raises(InvalidRequest, match=r"set at least 4\.2 MB"):
        shared_memory_budget(tmp_path, setting, **NO_CGROUP)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match="/no/such/folder"):
        shared_memory_budget("/no/such/folder", None, **NO_CGROUP)


def cgroup(tmp_path: Path, member: str, **files: str) -> dict[str, Path]:
    """A cgroup tree: `a__b` in a name stands for a/b, `_` at its end for nothing."""
    root = tmp_path / "cgroup"
    for name, text in files.items():
        *folders, file = name.split("__")
        folder = root.joinpath(*folders)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.replace("_", ".", 1)).write_text(text)
    membership = tmp_path / "membership"
    membership.write_text(member)
    return {"cgroup_root": root, "membership": membership}


@pytest.mark.parametrize(
    ("member", "files", "room"),
    [
        # v2: the own cgroup, one above it, and none.
        ("0::/pod\n", {"pod__memory_max": f"{64 * MIB}\n"}, 64),
        ("0::/pod/box\n", {"pod__memory_max": f"{64 * MIB}", "pod__box__memory_max": "max"}, 64),
        ("0::/\n", {"memory_max": f"{64 * MIB}\n"}, 64),
        ("0::/\n", {"memory_max": "max\n"}, None),
        ("", {}, None),
        # A path of the host, seen from a container: only what is visible counts.
        ("0::/kube/pod\n", {"memory_max": f"{64 * MIB}\n"}, 64),
        ("0::/../other\n", {"memory_max": f"{64 * MIB}\n"}, 64),
        # What is used already is not there to take; file cache is.
        (
            "0::/\n",
            {"memory_max": f"{64 * MIB}", "memory_current": f"{24 * MIB}"},
            40,
        ),
        (
            "0::/\n",
            {
                "memory_max": f"{64 * MIB}",
                "memory_current": f"{24 * MIB}",
                "memory_stat": f"anon 1\ninactive_file {8 * MIB}\nactive_file {4 * MIB}\n",
            },
            52,
        ),
    ],
)
def test_cgroup_v2_limits_count(
    tmp_path: Path, member: str, files: dict[str, str], room: int | None
) -> None:
    paths = cgroup(tmp_path, member, **files)
    budget = shared_memory_budget(tmp_path, 100 * MIB, **paths)
    assert budget.capacity_bytes == (room or 100) * MIB


@pytest.mark.parametrize(
    ("member", "limit", "room"),
    [
        ("4:memory:/\n0::/\n", f"{64 * MIB}\n", 64),
        ("4:cpu,memory:/docker/abc\n", f"{64 * MIB}\n", 64),
        ("4:memory:/\n", "9223372036854771712\n", None),
    ],
)
def test_cgroup_v1_limits_count(tmp_path: Path, member: str, limit: str, room: int | None) -> None:
    paths = cgroup(tmp_path, member)
    memory = tmp_path / "cgroup" / "memory"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text(limit)
    budget = shared_memory_budget(tmp_path, 100 * MIB, **paths)
    assert budget.capacity_bytes == (room or 100) * MIB


def test_a_cgroup_that_is_too_small_is_named(tmp_path: Path) -> None:
    paths = cgroup(tmp_path, "0::/\n", memory_max=f"{2 * MIB}")
    with pytest.raises(InvalidRequest, match=r"cgroup leaves 2\.1 MB.*memory limit"):
        shared_memory_budget(tmp_path, None, **paths)


def test_this_machine_has_a_budget() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm here")
    budget = shared_memory_budget("/dev/shm", 8 * MIB)
    assert budget == Budget(8 * MIB, 4 * MIB)
