"""One side: every case in this process, on one Ray start, its answers written as JSON.

`python -m tests.interop.parity.side peer|dropin ADDRESS OUT`; an empty ADDRESS starts a Ray here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SIDES = ("peer", "dropin")
PEER_VERSION = "0.1.11"
CASE_TIMEOUT_S = 60
MOST_FREED = 32
SIDE_TIMEOUT_S = 140


def answers(side: str, address: str = "", only: str = "") -> dict[str, Any]:
    """What one side gives to each case, by name. RuntimeError with its output if it broke."""
    environ = {
        name: value for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "RAY_RUNTIME_ENV_HOOK", "RAY_ADDRESS")
    }  # fmt: skip
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answers.json")
        command = [sys.executable, "-m", "tests.interop.parity.side", side, address, str(out), only]
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the side {side} ended with {done.returncode}:\n{done.stderr[-4000:]}"
            )
        return json.loads(out.read_text())


def main(side: str, address: str, out: str, only: str) -> None:
    warnings.simplefilter("ignore")
    if side == "dropin":
        from dataplane.compat import activate

        activate()
    import ray

    # The workers of the peer must not find the drop-in on a path that their cluster was given.
    env = {} if side == "dropin" else {"runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}}}
    if address:
        ray.init(address=address, log_to_driver=False, **env)
    else:
        memory = 80 << 20  # the least that Ray takes
        ray.init(
            address="local", num_cpus=8, object_store_memory=memory, include_dashboard=False,
            log_to_driver=False, **env,
        )  # fmt: skip
    import transfer_queue
    from omegaconf import OmegaConf

    ours = Path(str(transfer_queue.__file__)).is_relative_to(ROOT / "dataplane")
    assert ours == (side == "dropin"), f"{side} found {transfer_queue.__file__}"
    # Polling: an answer to a claim of too few rows is an empty batch at once, on both sides.
    units = {"SimpleStorage": {"num_data_storage_units": 1}}
    conf = {"controller": {"polling_mode": True}, "backend": units, "enable": True}
    transfer_queue.init(OmegaConf.create(conf))
    try:
        Path(out).write_text(json.dumps(_all(transfer_queue, only)))
    finally:
        transfer_queue.close()
        ray.shutdown()


def _all(tq: Any, only: str) -> dict[str, Any]:
    from tests.interop.parity.cases import load

    def late(*_: Any) -> None:
        raise TimeoutError(f"the case took over {CASE_TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, late)
    found: dict[str, Any] = {}
    for name, case in load().items():
        if name.startswith(only):
            found[name] = _one(case, tq)
            if case.live:
                _use_up(tq)
    return found


def _use_up(tq: Any) -> None:
    """Take the indexes that a case freed, so that no later case gets them again.

    The peer hands freed indexes out again, and its claims go by index: which rows they find first
    would depend on what ran before.
    """
    tq.get_client().get_meta([], MOST_FREED, "used up", mode="insert")


def _one(case: Any, tq: Any) -> Any:
    from tests.interop.parity.describe import describe

    signal.alarm(CASE_TIMEOUT_S)
    try:
        return describe(case.run(tq))
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-3:])
        return {"broke": type(error).__name__, "where": text[-1500:]}
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main(*sys.argv[1:5])
