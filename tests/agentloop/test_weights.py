"""Engines take weights that lie in the plane, or keep what they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from agentloop.engines.hf import HFEngine
from agentloop.engines.types import Request, Sampling, WeightsError
from agentloop.engines.weights import load_weights
from agentloop.tiny import tiny_model, tiny_tokenizer
from dataplane import Client, publish_weights


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(plane_settings, name="engine-weights")
    yield client
    client.close(destroy=True)


@pytest.fixture
def client(plane: Client) -> Iterator[Client]:
    yield plane
    for name in plane.kv_list_partitions():
        plane.kv_drop_partition(name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
async def test_an_engine_takes_the_newest_weights(client: Client, family: str) -> None:
    tokenizer = tiny_tokenizer()
    trained = tiny_model(tokenizer, family=family, seed=1)
    publish_weights(client, trained, 12)
    request = Request("r", [5, 6, 7], Sampling(max_tokens=6, min_tokens=6, temperature=0.0))
    engine = HFEngine(tiny_model(tokenizer, family=family, seed=0), threads=1)
    same = HFEngine(trained, threads=1)
    try:
        assert await load_weights(engine, client) == 12
        assert engine.policy_version == 12
        answer = await engine.generate(request)
        assert answer.versions == [12] * 6
        expected = await same.generate(request)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        publish_weights(client, {"other": torch.zeros(1)}, 13)
        with pytest.raises(WeightsError, match="unknown: other"):
            await load_weights(engine, client)
        assert await load_weights(engine, client, 12) == 12
    finally:
        await engine.close()
        await same.close()
