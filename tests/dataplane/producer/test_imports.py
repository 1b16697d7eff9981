"""A producer needs grpcio, protobuf and numpy, and nothing else that is not Python's own."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import sys, json
blocked = ("torch", "ray", "msgpack", "pydantic", "pyarrow", "uvloop", "tensordict", "transformers",
           "prometheus_client", "typer", "rich", "aiohttp", "yaml", "dataplane.wire",
           "dataplane.client.core", "dataplane.gateway")
class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in blocked):
            raise ImportError(f"{name} is not for producers")
sys.meta_path.insert(0, Block())
before = set(sys.modules)
from dataplane.producer import AsyncProducer, Producer, Trajectory
Trajectory.from_response("u", [1], [2], [-0.5]).to_message()
Producer("grpc+unix:///nowhere").close()
outside = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(outside - set(sys.stdlib_module_names))))
"""


def test_a_producer_loads_nothing_but_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {name for name in json.loads(done.stdout) if not name.startswith(("_", "grpc_"))}
    assert loaded <= {"dataplane", "google", "grpc", "numpy", "cython_runtime", "typing_extensions"}
