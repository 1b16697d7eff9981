"""Names of TransferQueue's own tests that say what its public interface does, in three groups.

Only the names: their text stays where it is. Functions are counted; one that runs with several
parameters passes when all of its runs do.
"""

from __future__ import annotations

Names = dict[str, list[str]]
"""File to the tests in it, each `Class::test` or `test`."""

KV = "tests/e2e/test_kv_interface_e2e.py"
LIFECYCLE = "tests/e2e/test_e2e_lifecycle_consistency.py"
CHECKPOINT = "tests/e2e/test_checkpoint_e2e.py"
METADATA = "tests/test_metadata.py"
SAMPLERS = "tests/test_samplers.py"
STREAMING = "tests/test_streaming_dataset.py"


def _of(prefix: str, names: str) -> list[str]:
    return [prefix + name for name in names.split()]


LIVE: Names = {
    KV: [
        *_of(
            "TestKVPutE2E::test_kv_put_",
            "with_dict_fields with_tensordict_fields returns_cumulative_fields",
        ),
        *_of("TestKVBatchPutE2E::test_kv_batch_put_", "returns_cumulative_fields"),
        *_of(
            "TestKVGetE2E::test_kv_batch_get_",
            "nested_tensor single_key multiple_keys partial_keys partial_fields nonexistent_key",
        ),
        *_of(
            "TestKVBatchGetByMetaE2E::test_kv_batch_get_by_meta_",
            "select_fields_override select_fields_invalid from_kv_batch_put multiple_puts",
        ),
        *_of("TestKVListE2E::test_kv_list_", "single_partition all_partitions empty_partition"),
        *_of(
            "TestKVClearE2E::test_kv_clear_",
            "multiple_keys does_not_leak_reused_index_across_partitions",
        ),
    ],
    LIFECYCLE: _of(
        "test_",
        "core_consistency cross_shard_complex_update production_status_lifecycle "
        "custom_metadata_persistence reset_consumption clear_partition "
        "dynamic_tensor_shape_nested_transition retrieved_data_writability_and_memory_safety",
    ),
    CHECKPOINT: [
        "TestCheckpointRoundtrip::test_user_metadata_preserved",
        *_of("TestCheckpointErrors::test_load_raises_if_", "dir_missing metadata_missing"),
    ],
}
"""Use a live plane and the public interface only."""

CONTAINERS: Names = {
    METADATA: [
        *_of(
            "TestBatchMetaColumnar::test_",
            "basic_init production_status_vector chunk chunk_by_partition concat "
            "custom_meta_update custom_backend_meta size_property "
            "pickle_roundtrip_preserves_batchmeta "
            "concat_extra_info_scalar_conflict_raises_value_error "
            "concat_extra_info_key_union_with_warning concat_extra_info_tensor_equal_preserved "
            "setstate_readonly_production_status shallow_copy_isolation_global_indexes "
            "shallow_copy_isolation_extra_info shallow_copy_isolation_field_schema "
            "select_fields_isolation_extra_info select_fields_isolation_custom_meta "
            "concat_no_double_copy_regression concat_extra_info_identical_scalars_preserved "
            "chunk_concat_roundtrip_preserves_extra_info union_basic union_overlapping_fields "
            "union_production_status_and union_validation_global_index_mismatch "
            "union_validation_partition_id_mismatch union_empty_other_returns_copy "
            "union_empty_self_returns_copy",
        ),
        *_of(
            "TestKVBatchMeta::test_kv_batch_meta_",
            "basic_init empty_init init_validation_keys_tags_mismatch "
            "init_validation_duplicate_keys init_validation_duplicate_fields select_keys "
            "select_keys_validation_duplicate select_keys_validation_nonexistent reorder "
            "reorder_validation_size_mismatch reorder_validation_duplicate_indexes chunk "
            "chunk_with_more_chunks_than_samples concat concat_with_empty_chunks "
            "concat_validation_field_mismatch concat_validation_partition_mismatch "
            "concat_empty_list deepcopy_tags deepcopy_extra_info "
            "concat_extra_info_conflict_raises",
        ),
    ],
    SAMPLERS: [
        *_of(
            "TestBaseSampler::test_base_sampler_",
            "is_abstract has_abstract_methods has_call_method initialization_states",
        ),
        *_of(
            "TestSequentialSampler::test_sequential_sampler_",
            "initialization basic_functionality empty_ready_indexes "
            "batch_size_larger_than_ready zero_batch_size negative_batch_size "
            "non_sequential_indexes duplicate_indexes call_method with_extra_kwargs",
        ),
        *_of(
            "TestGRPOGroupNSampler::test_grpo_sampler_",
            "initialization basic_functionality partial_batch batch_size_divisibility "
            "insufficient_ready_indexes exact_multiple_available zero_batch_size "
            "single_sample_per_prompt large_group_size call_method with_extra_kwargs "
            "non_sequential_indexes invalid_n_samples_per_prompt no_complete_groups mixed_groups "
            "sorting_functionality insufficient_groups",
        ),
        *_of(
            "TestRankAwareSampler::test_rank_aware_sampler_",
            "initialization basic_sampling caching_on_same_batch_index different_batch_indexes "
            "multiple_dp_ranks empty_ready_indexes batch_size_larger_than_ready zero_batch_size "
            "multiple_tasks multiple_partitions invalid_dp_rank with_extra_kwargs call_method",
        ),
        *_of(
            "TestSeqlenBalancedSampler::test_",
            "initialization_invalid_dp_size fallback_equal_split_no_partition fallback_single_dp "
            "balanced_partitioning_with_custom_meta balanced_partitioning_group_level "
            "caching_returns_same_result different_batch_index_not_cached "
            "states_cache_populated_for_all_ranks clear_cache "
            "clear_cache_only_affects_target_partition insufficient_ready_indexes "
            "dp_rank_out_of_range call_method batch_size_not_divisible_by_n_samples_per_prompt",
        ),
        *_of(
            "TestKarmarkarKarp::test_",
            "equal_size_basic equal_size_balance_quality unequal_size single_partition "
            "equal_size_assertion_error too_few_items three_way_partition identical_seqlens",
        ),
        *_of(
            "TestSamplerIntegration::test_samplers_",
            "implement_base_interface return_consistent_types handle_edge_cases_consistently",
        ),
    ],
    STREAMING: _of("test_chunk_batch_fn_", "dense mixed_dense_and_jagged strided"),
}
"""Containers, samplers and streaming: need no plane."""

INSIDE: Names = {
    KV: [
        *_of(
            "TestKVPutE2E::test_kv_put_",
            "single_sample_with_fields_and_tag update_tag_only partial_update",
        ),
        *_of("TestKVBatchPutE2E::test_kv_batch_put_", "multiple_samples partial_update"),
        *_of("TestKVClearE2E::test_kv_clear_", "single_key idempotent"),
        "TestKVE2ECornerCases::test_field_expansion_across_samples",
    ],
    CHECKPOINT: [
        *_of(
            "TestCheckpointRoundtrip::test_",
            "tensor_fields controller_metadata multiple_partitions non_tensor_fields "
            "nested_tensor_fields",
        ),
        *_of("TestIncludeStorageFalse::test_", "storage_saved_is_true both_restored_after_load"),
        *_of("TestCheckpointErrors::test_", "save_raises_if_not_initialized"),
        *_of("TestCheckpointErrors::test_", "load_raises_if_not_initialized"),
        *_of("TestCheckpointErrors::test_", "no_partial_state_on_failed_save"),
    ],
}
"""Look inside: at the controller's snapshot of a partition, at files, at attributes of modules."""

GROUPS: dict[str, Names] = {"live": LIVE, "containers": CONTAINERS, "inside": INSIDE}

ELSEWHERE: dict[str, str] = {
    f"{LIFECYCLE}::test_gdr_gpu_tensor_roundtrip": "another storage backend, and a GPU",
    f"{LIFECYCLE}::test_gdr_cpu_tensor_roundtrip": "another storage backend, and a GPU",
    f"{METADATA}::TestStorageUnitDataStrict::test_put_data_length_mismatch_raises": (
        "about the peer's storage unit"
    ),
    f"{CHECKPOINT}::TestCheckpointErrors::test_load_raises_on_storage_unit_count_mismatch": (
        "the peer loads into as many units as saved; this plane loads into any number"
    ),
}
"""Tests of the same files that belong to no group, and why."""
