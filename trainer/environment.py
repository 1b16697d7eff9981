"""Where a run runs: versions and a few variables, for who reads its results later.

Owns the list of variables that are written down. Every other one is left out, whatever it holds.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final, cast

from trainer.config.masking import masked

PACKAGES: Final = (
    "rl-dataplane torch ray transformers tokenizers safetensors peft tensordict numpy pyarrow "
    "msgpack pydantic uvloop reasoning-gym"
).split()

VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUBLAS_WORKSPACE_CONFIG NVIDIA_VISIBLE_DEVICES "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS PYTHONHASHSEED PYTHONUNBUFFERED "
    "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_NCCL_ASYNC_ERROR_HANDLING "
    "NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME "
    "RAY_ADDRESS TOKENIZERS_PARALLELISM HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
    "SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_NTASKS LANG TZ"
).split()


def environment(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Versions, the machine's size, and the listed variables that are set: plain data."""
    given = os.environ if variables is None else variables
    listed = {name: given[name] for name in VARIABLES if name in given}
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": cast("dict[str, str]", masked(listed, given)),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
