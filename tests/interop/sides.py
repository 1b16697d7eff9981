"""The two packages named `transfer_queue`: how a child process imports one of them, and its Ray.

Run as a program it is that Ray: a cluster that lives until its standard input closes.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["drop-in", "peer"]

SIDES: tuple[Side, ...] = ("drop-in", "peer")
CPUS = 4
"""The peer takes one for its controller and one for each of two storage units."""
START_S = 120.0


def environment(side: Side, **more: str) -> dict[str, str]:
    """The variables of a process, and of Ray workers below it, that import this side's package."""
    from dataplane.compat import HOOK, folder

    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [part for part in path if part != folder()]
    hook = {}
    if side == "drop-in":
        path.insert(0, folder())
        hook = {"RAY_RUNTIME_ENV_HOOK": HOOK}
    kept = {name: value for name, value in os.environ.items() if name != "RAY_RUNTIME_ENV_HOOK"}
    return {
        **kept,
        **hook,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **more,
    }


@contextmanager
def ray_cluster(variables: Mapping[str, str]) -> Generator[dict[str, str]]:
    """A Ray cluster whose workers have these variables: the variables of processes that join it."""
    variables = {
        **variables,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve())],
        env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as cluster:  # fmt: skip
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        try:
            address = ""
            while not address.startswith("address "):
                address = cluster.stdout.readline()
                if not address:
                    raise RuntimeError(f"no Ray cluster started: exit code {cluster.wait(START_S)}")
            yield {**variables, "RAY_ADDRESS": address.split()[1]}
        finally:
            cluster.stdin.close()
            try:
                cluster.wait(START_S)
            except subprocess.TimeoutExpired:
                cluster.kill()


def _serve() -> None:
    import ray

    ray.init(
        address="local", num_cpus=CPUS, object_store_memory=80 << 20, include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    _serve()
