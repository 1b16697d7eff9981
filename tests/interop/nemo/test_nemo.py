"""NeMo-RL's call sequences on the drop-in; with a checkout of it, its own tests too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.interop.child import Outcome
from tests.interop.nemo import contract, loading
from tests.interop.nemo.__main__ import judge, run_contract, run_sequences
from tests.interop.sides import environment

PASSED = Outcome("passed")
FAILED = Outcome("failed", "AssertionError: no")


@pytest.mark.ray
@pytest.mark.transferqueue
def test_the_adapters_calls_are_answered(ray_cluster: list[str], runtime_dir: Path) -> None:
    wrong = run_sequences(_variables(runtime_dir))
    assert len(wrong) == 12
    assert not any(wrong.values()), "\n".join(filter(None, wrong.values()))


@pytest.mark.ray
@pytest.mark.transferqueue
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(loading.CHECKOUT), reason="NEMO_RL names no checkout")
@pytest.mark.parametrize("through_adapter", [False, True])
def test_its_own_tests_pass(
    ray_cluster: list[str], runtime_dir: Path, through_adapter: bool
) -> None:
    checkout = Path(os.environ[loading.CHECKOUT]).resolve()
    found = run_contract(
        "drop-in", checkout, _variables(runtime_dir), through_adapter=through_adapter
    )
    files = contract.THROUGH_ADAPTER if through_adapter else contract.AS_WRITTEN
    aside = contract.NEEDS_MORE | (contract.IN_MEMORY_ONLY if through_adapter else {})
    lines, good = judge(files, found, aside)
    assert good, "\n".join(lines)


def test_a_file_with_fewer_passes_than_known_or_with_a_failure_is_no_good() -> None:
    files = {"test_a.py": 2}
    outcomes = {"test_a.py::test_1": PASSED, "test_a.py::test_2": PASSED}
    assert judge(files, outcomes, {})[1]
    assert judge(files, {**outcomes, "test_a.py::test_3": PASSED}, {})[1]
    assert not judge(files, {"test_a.py::test_1": PASSED}, {})[1]
    worse = {**outcomes, "test_a.py::test_3": FAILED}
    assert not judge(files, worse, {})[1]
    lines, good = judge(files, worse, {"test_a.py::test_3": "about something else"})
    assert good
    assert "  not counted: test_a.py::test_3: about something else (failed)" in lines


def test_every_test_set_aside_is_of_a_file_that_runs() -> None:
    for name in contract.IN_MEMORY_ONLY:
        assert name.split("::")[0] in contract.THROUGH_ADAPTER
    for name in contract.NEEDS_MORE:
        assert name.split("::")[0] in contract.AS_WRITTEN


def test_a_folder_without_its_data_plane_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no checkout of NeMo-RL"):
        loading.load(tmp_path)


def _variables(runtime_dir: Path) -> dict[str, str]:
    """Those of a process that joins the session's Ray cluster, with an instance of its own."""
    import ray

    return environment(
        "drop-in",
        RAY_ADDRESS=ray.get_runtime_context().gcs_address,
        DATAPLANE_TRANSFER_QUEUE_NAME=f"nemo-{os.getpid()}",
        DATAPLANE_RUNTIME_DIR=str(runtime_dir),
    )
