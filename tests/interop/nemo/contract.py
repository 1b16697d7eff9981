"""NeMo-RL's own tests of its data plane: which files, how many tests, and which say nothing here.

Run twice on a side. `as_written`: most of these use its in-memory client, some the adapter.
`through_adapter`: every client of theirs is the adapter on one live instance.
"""

from __future__ import annotations

FOLDER = "tests/unit/data_plane"

AS_WRITTEN: dict[str, int] = {
    "test_codec_jagged.py": 12,
    "test_codec_mooncake.py": 14,
    "test_codec_wire_stripped.py": 6,
    "test_correctness.py": 17,
    "test_factory.py": 5,
    "test_interface_contract.py": 7,
    "test_kvbatchmeta.py": 18,
    "test_local_node_ip.py": 5,
    "test_message_log_decompose.py": 13,
    "test_observability.py": 9,
    "test_preshard_extras.py": 11,
    "test_seqpack_equivalence.py": 3,
    "test_sync_one_hop.py": 6,
    "test_tq_lifecycle.py": 7,
    "test_writeback_pipeline_e2e.py": 2,
}
"""File -> tests that have to pass; more of them are welcome."""

THROUGH_ADAPTER: dict[str, int] = {
    "test_correctness.py": 12,
    "test_interface_contract.py": 5,
    "test_observability.py": 8,
    "test_preshard_extras.py": 11,
    "test_sync_one_hop.py": 4,
    "test_writeback_pipeline_e2e.py": 2,
}
"""The files whose client is the in-memory one as they are written."""

TRAINERS = (
    "imports NeMo-RL's trainers, which need packages and a version of transformers of their own"
)
_SYNC = "test_sync_one_hop.py::test_apply_dynamic_sampling_"

NEEDS_MORE: dict[str, str] = {
    f"{_SYNC}filters_zero_std": TRAINERS,
    f"{_SYNC}completes_when_train_size_reached": TRAINERS,
    f"{_SYNC}overflow_slices_and_clears": TRAINERS,
    f"{_SYNC}raises_on_max_gen_batches": TRAINERS,
}
"""Tests that are not counted in either run, and why."""

_KEY_ERROR = "wants KeyError of a get after a clear; TransferQueue raises ValueError"
_NO_CHECK = "only the in-memory client refuses what is no tensor"

IN_MEMORY_ONLY: dict[str, str] = {
    "test_correctness.py::test_kv_batch_get_after_clear_raises": _KEY_ERROR,
    "test_correctness.py::test_kv_batch_get_unproduced_field_raises": (
        "wants KeyError; TransferQueue leaves the field out"
    ),
    "test_correctness.py::test_kv_batch_put_rejects_non_tensor_leaves": _NO_CHECK,
    "test_correctness.py::test_claim_meta_unregistered_task_raises": (
        "TransferQueue has no register of tasks: the claim waits for its minute and times out"
    ),
    "test_correctness.py::test_double_register_partition_is_idempotent_overwrite": (
        "looks at an attribute of the in-memory client"
    ),
    "test_interface_contract.py::test_register_put_get_clear": _KEY_ERROR,
    "test_interface_contract.py::test_kv_batch_put_rejects_non_tensor_leaves": _NO_CHECK,
    "test_observability.py::test_error_status_recorded_and_reraised": _KEY_ERROR,
    "test_sync_one_hop.py::test_kv_clear_uses_meta_keys_minted_at_rollout": _KEY_ERROR,
    "test_sync_one_hop.py::test_full_sync_step_lifecycle_on_realistic_batch": _KEY_ERROR,
}
"""Tests that are about the in-memory client: not counted through the adapter, on either side."""

SLOW = ["test_claim_meta_unregistered_task_raises"]
"""Not even run through the adapter: see there."""
