"""A run's values on a port, beside its other trackers."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from trainer.report import open_trackers, prometheus


def _scraped(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as page:
        return page.read().decode()


def test_the_last_values_of_a_step_are_scraped() -> None:
    tracker = prometheus(0)
    try:
        tracker.log({"time/step": 2.5, "throughput/e2e_effective_tgs": 100.0}, 7)
        tracker.log({"train_metrics/worker_0/loss": 0.5}, 21)
        text = _scraped(tracker.target)
    finally:
        tracker.close()
    assert 'dataplane_run_value{name="time/step"} 2.5' in text
    assert 'dataplane_run_value{name="train_metrics/worker_0/loss"} 0.5' in text
    assert "dataplane_run_step 7.0" in text  # optimizer steps count by themselves


def test_it_is_opened_by_the_settings_of_a_run(tmp_path: Path) -> None:
    trackers = open_trackers([("prometheus", {"port": 0})], tmp_path, name="run")
    trackers.log({"time/step": 1.0}, 1)
    trackers.close()
    assert trackers.failures == {"prometheus": 0}
    with pytest.raises(ValueError, match="prometheus"):
        open_trackers([("prometheus", {"no": 1})], tmp_path, name="run")
