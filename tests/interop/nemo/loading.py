"""NeMo-RL's data plane without the rest of NeMo-RL: runs in the process that tests it.

`nemo_rl/__init__.py` looks for containers, virtual environments and profilers; the data plane
needs none of them. Two packages that it names only in annotations may be absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

CHECKOUT = "NEMO_RL"
"""The variable that names a checkout of NeMo-RL."""
THROUGH = "NEMO_RL_THROUGH_ADAPTER"
"""Set where tests that are written for its in-memory client shall run on TransferQueue."""
UNINSTALLABLE = "TransferQueue==0.0.0"

CONFIG: dict[str, Any] = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 1024,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.05,
    "global_segment_size": 1 << 30,
    "local_buffer_size": 1 << 30,
}


def prepare() -> None:
    """Make `nemo_rl.data_plane` importable from the checkout. Called before pytest."""
    load(Path(os.environ[CHECKOUT]))
    adapter = importlib.import_module("nemo_rl.data_plane.adapters.transfer_queue")
    if _is_drop_in(adapter.tq):
        # NeMo has the peer installed for the peer's actors: here that must not even be tried.
        adapter._resolve_tq_pin = lambda: UNINSTALLABLE
    else:
        adapter._TQ_RUNTIME_ENV_PATCHED = True  # the requirement is of an installed nemo-rl
    if os.environ.get(THROUGH):
        _run_on_transfer_queue(adapter)


def load(checkout: Path) -> None:
    """Make the package `nemo_rl` importable, without running its `__init__`."""
    if not (checkout / "nemo_rl" / "data_plane").is_dir():
        raise FileNotFoundError(f"{checkout} is no checkout of NeMo-RL: it has no data plane")
    package = types.ModuleType("nemo_rl")
    package.__path__ = [str(checkout / "nemo_rl")]
    sys.modules["nemo_rl"] = package
    if importlib.util.find_spec("datasets") is None:
        absent = types.ModuleType("datasets")
        absent.Dataset = type("Dataset", (), {})  # type: ignore[attr-defined]
        sys.modules["datasets"] = absent


def _is_drop_in(package: Any) -> bool:
    from dataplane.compat import folder

    return str(package.__file__).startswith(folder() + os.sep)


def _run_on_transfer_queue(adapter: Any) -> None:
    """Put NeMo's adapter in the place of its in-memory client.

    Each test gets a client of one instance that begins empty; what closes it leaves the instance.
    """
    tq = adapter.tq

    class Adapter(adapter.TQDataPlaneClient):
        def __init__(self) -> None:
            super().__init__(CONFIG, bootstrap=True)
            for partition, keys in tq.kv_list().items():
                if keys:
                    tq.kv_clear(keys=list(keys), partition_id=partition)

        def close(self) -> None:
            self._closed = True

    importlib.import_module("nemo_rl.data_plane.adapters.noop").NoOpDataPlaneClient = Adapter
