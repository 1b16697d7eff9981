"""States of the random generators of this process, as plain data and back.

Owns those of `random`, numpy and torch on the CPU: what a driver draws from. Ranks keep their own.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np


def random_states() -> dict[str, Any]:
    """Where the generators are now."""
    import torch

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(
        "tuple[str, Any, int, int, float]", np.random.get_state(legacy=True)
    )
    state = torch.get_rng_state().numpy().tobytes()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": base64.b64encode(state).decode(),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Draw on from where the states were taken. ValueError if they are none."""
    import torch

    try:
        version, internal, gauss = states["python"]
        name, keys, position, has_gauss, cached = states["numpy"]
        raw = base64.b64decode(states["torch"], validate=True)
        python = (int(version), tuple(map(int, internal)), gauss)
        numpy = (str(name), np.asarray(keys, np.uint32), int(position), int(has_gauss), cached)
        # All are looked at before the first is set.
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"these are no states of random generators: {error!r}") from None
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(state)
