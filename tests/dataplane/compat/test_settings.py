"""What `init` makes of a configuration, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_queue import GRPOGroupNSampler, SequentialSampler, instance

from dataplane.errors import InvalidRequest


def test_unknown_settings_are_kept_and_the_rest_is_merged_over_the_defaults() -> None:
    """verl passes `enable`, and sections of other backends."""
    given = {
        "enable": True,
        "backend": {"MooncakeStore": {"auto_init": True}},
        "metrics": {"port": 7},
    }
    settings = instance.merged(given)
    assert settings.enable is True
    assert settings.backend.MooncakeStore.auto_init is True
    assert settings.backend.storage_backend == "SimpleStorage"
    assert (settings.metrics.port, settings.metrics.enabled) == (7, False)


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"backend": {"storage_backend": "MooncakeStore"}}, r"'MooncakeStore' .* SimpleStorage"),
        (
            {"backend": {"SimpleStorage": {"ssd_offload": {"enabled": True}}}},
            "ssd_offload.* false",
        ),
        ({"dataplane": {"capasity_bytes": 5}}, "capasity_bytes"),
        ({"dataplane": {"capacity_bytes": 5}}, "capacity_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(conf: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){says}"):
        instance.plane_settings(instance.merged(conf))


def test_the_plane_is_open_and_goes_soon_after_its_last_client() -> None:
    config = instance.plane_settings(instance.merged({"dataplane": {"timeout_s": 3}}))
    assert (config.host, config.open_schemas, config.timeout_s) == ("ray", True, 3.0)
    assert config.linger_s == instance.LINGER_S
    kept = instance.plane_settings(instance.merged({"dataplane": {"linger_s": 5}}))
    assert kept.linger_s == 5


def test_a_sampler_is_named_or_given_as_a_class_or_an_instance() -> None:
    made = GRPOGroupNSampler(n_samples_per_prompt=4)
    assert instance.sampler_of(made) is made
    assert type(instance.sampler_of("SequentialSampler")) is SequentialSampler
    assert type(instance.sampler_of(SequentialSampler)) is SequentialSampler
    for wrong in ("Nope", "BatchMeta", int, None):
        with pytest.raises(ValueError, match="Could not find sampler"):
            instance.sampler_of(wrong)
