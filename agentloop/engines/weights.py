"""Weights from the plane to an engine. What they look like there is in `dataplane.weights`."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from agentloop.engines.types import Engine, WeightsError
from dataplane import Client, WeightsNotFound, read_weights


async def load_weights(
    engine: Engine,
    client: Client,
    version: int | None = None,
    *,
    prefix: str = "weights",
    timeout: float | None = None,
) -> int:
    """Give an engine a version's weights, None for the newest; which version that was.

    Raises:
        WeightsError: it is not there, not whole, or does not fit; the engine has what it had.
    """
    with ExitStack() as views:
        reading = read_weights(client, version, prefix=prefix, timeout=timeout)
        try:
            weights = await asyncio.to_thread(views.enter_context, reading)
        except WeightsNotFound as error:
            raise WeightsError(str(error)) from error
        await engine.update_weights(weights.tensors, weights.version)
        return weights.version
