"""What the way to a batch cost: counts of evicted groups under the names of verl's V1 trainer."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.select.replay import Decision


def replay_metrics(decisions: Iterable[Decision], prefix: str = "training") -> dict[str, float]:
    """What was evicted on the way to one batch, as counts of groups."""
    made = list(decisions)
    evicted = [eviction for decision in made for eviction in decision.evicted]
    spans = [eviction.span for eviction in evicted if eviction.span is not None]
    counts: dict[str, float] = {
        "off_policy/evicted_samples": sum("stale" in e.reasons for e in evicted),
        "filter_groups/evicted_samples": sum("identical" in e.reasons for e in evicted),
        "filter_groups/discarded_surplus_samples": sum(len(d.surplus) for d in made),
        "rollout_failure/evicted_samples": sum(
            not e.reasons.isdisjoint(("failure", "lost", "incomplete")) for e in evicted
        ),
    }
    lost = sum("lost" in e.reasons for e in evicted)
    if lost:
        counts["rollout_lost/evicted_samples"] = lost
    if spans:
        counts["off_policy/evicted_samples_staleness/mean"] = sum(spans) / len(spans)
        counts["off_policy/evicted_samples_staleness/max"] = max(spans)
        counts["off_policy/evicted_samples_staleness/min"] = min(spans)
    return {f"{prefix}/{name}": value for name, value in counts.items()}


def filtered_values(decisions: Iterable[Decision]) -> dict[float, int]:
    """How many groups went for each outcome that all of their sessions had."""
    counts: dict[float, int] = {}
    for decision in decisions:
        for eviction in decision.evicted:
            if eviction.outcome is not None:
                counts[eviction.outcome] = counts.get(eviction.outcome, 0) + 1
    return counts
