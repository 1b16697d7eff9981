"""Under Ray each actor's process has an endpoint, and the tag store knows them all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane.metrics.targets import list_targets
from tests.dataplane.metrics.scraping import Scrape, ask
from tests.deadline import eventually

pytestmark = pytest.mark.ray


def test_every_actor_is_found_and_scraped(
    ray_cluster: list[str], plane_settings: dict[str, Any]
) -> None:
    settings = {**plane_settings, "host": "ray", "metrics_port": 0, "linger_s": 5}
    client = dataplane.init(settings, name=f"measured-{os.getpid()}")
    runtime = Path(plane_settings["runtime_dir"]) / client.plane_id
    try:
        client.kv_put("k", "train", {"x": torch.zeros(100_000)})
        status = client.status()
        ((store_id, store),) = status["values"].items()
        tags, values = Scrape(status["metrics"]), Scrape(store["metrics"])
        assert status["metrics"] != store["metrics"]
        assert tags.value("dataplane_build_info", role="tag_store") == 1
        assert tags.value("dataplane_puts_total") == 1
        assert tags.value("dataplane_stores_connected") == 1
        assert tags.all("dataplane_store_used_bytes") == []
        assert values.value("dataplane_build_info", role="value_store") == 1
        assert values.value("dataplane_store_received_bytes_total", store=store_id) >= 400_000
        assert values.value("dataplane_store_joined", store=store_id) == 1
        assert values.all("dataplane_puts_total") == []
        told = json.loads(ask(status["metrics"], "/targets").body)
        assert [group["targets"] for group in told] == [[status["metrics"]], [store["metrics"]]]
        assert told[1]["labels"]["store"] == store_id
        assert {group["labels"]["role"] for group in list_targets(runtime)} == {
            "tag_store", "value_store",
        }  # fmt: skip
        # A store's process that is killed comes again, with another port, which is known too.
        os.kill(store["pid"], 9)

        def again() -> bool:
            found = client.status()["values"][store_id]
            return found.get("metrics") not in (None, store["metrics"])

        eventually(again, "the value store is back", within_s=60)
        now = client.status()["values"][store_id]["metrics"]
        eventually(
            lambda: json.loads(ask(status["metrics"], "/targets").body)[1]["targets"] == [now],
            "the tag store has heard of it",
        )
        assert ask(status["metrics"], "/readyz").status == 200
    finally:
        client.close(destroy=True)
    eventually(lambda: not runtime.exists(), "the plane has ended", within_s=30)
