"""The measurement of what metrics cost runs; what it finds is for a quiet machine to judge."""

from __future__ import annotations

from tests.bench import metrics


def test_a_small_run_has_a_ratio_of_every_call() -> None:
    ratios = metrics.cost(rounds=1, turns=1)
    assert {name: len(found) for name, found in ratios.items()} == dict.fromkeys(
        ("kv_put", "kv_batch_put", "kv_batch_get", "tags only"), 1
    )
    assert all(found[0] > 0 for found in ratios.values())
