"""The one table of what differs between TransferQueue 0.1.11 and the drop-in, and why it may."""

from __future__ import annotations

_TAG_VALUES = (
    "tags are None, bool, int of 64 bits, float, str, lists and maps with names of these, so that "
    "servers need no pickle; the error says which tag"
)
_WHOLE = (
    "a refused put leaves nothing behind; the peer registers the keys first, so that they stay "
    "listed without what was to be put"
)
_TYPED = "the same refusal as an error of the plane, which says what and what to do"
_RAGGED_SHAPE = (
    "the `shape` of a ragged field is None; the peer keeps that of the first row it ever saw, and "
    "None itself once batches are joined; each row's is in `per_sample_shapes`, alike on both"
)
_READY = "`is_ready` follows `production_status`; the peer's stays what it was at construction"

_RESERVED = "names under which the drop-in keeps its own state are refused"

DIFFERENCES: dict[str, str] = {
    # Stricter.
    "tags/whole_numbers_over_64_bits": _TAG_VALUES,
    "tags/bytes_in_a_tag": _TAG_VALUES,
    "tags/an_object_in_a_tag": _TAG_VALUES + "; the peer lists a date as text",
    "tags/names_that_are_numbers": _TAG_VALUES,
    "errors/a_parser": "a parser is code that a server would run, which this plane never does",
    # Nothing partly applied.
    "errors/too_few_tags": _WHOLE,
    "errors/too_few_tags_beside_rows": _WHOLE,
    "errors/a_key_twice_with_tags": _WHOLE,
    "errors/a_key_twice_with_values": _WHOLE,
    "errors/fields_that_are_a_list": _WHOLE,
    "errors/fields_that_are_a_tensor": _WHOLE,
    "errors/a_nested_tensor_in_one_put": _WHOLE,
    "errors/two_rows_in_one_put": _WHOLE,
    "errors/a_tag_that_is_text": _WHOLE,
    "errors/a_parser_that_fails": _WHOLE,
    # The same refusal, of a type that was not meant as one.
    "errors/a_dict_for_several_keys": _TYPED + "; the peer trips over a missing attribute",
    "errors/a_batch_without_rows": _TYPED + "; the peer trips over an index",
    "KVBatchMeta/chunk_into_none": _TYPED + "; the peer divides by zero",
    "client/a_bad_backend": _TYPED + "; the peer asserts",
    # Values kept as they were put.
    "tags/a_tuple_in_a_tag": "a put answers with the list that is stored and listed on both sides",
    "tags/a_tensor_in_a_tag": "a tensor of one number is stored as that number",
    "shapes/tuples": "a tuple among a row's values comes back as a tuple, not as a list",
    "shapes/two_dtypes_read_together": (
        "rows of two dtypes come back in the dtype that holds both, jagged; the peer casts to the "
        "first row's and loses the fractions"
    ),
    # More is taken.
    "checkpoints/rows_of_eight_bit_floats_come_back": (
        "a checkpoint holds rows of every dtype; the peer writes these, then fails to load any"
    ),
    "BatchMeta/nothing_given": "the empty batch: verl's bridge calls it like this on some ranks",
    # Told better.
    "BatchMeta/what_is_selected_is_apart": _READY,
    "BatchMeta/a_pickle": _READY,
    "client/claims_never_give_a_row_twice": _RAGGED_SHAPE,
    "client/keys_to_rows": _RAGGED_SHAPE,
    "client/a_key_twice_to_rows": _RAGGED_SHAPE,
    "client/a_worker_that_never_called_init": _RAGGED_SHAPE,
    "client/the_default_settings": (
        "the other backends are not there to be set; section `dataplane` has this plane's settings"
    ),
    "tags/the_drop_ins_own_tag": _RESERVED,
    "tags/a_key_like_the_drop_ins_own": _RESERVED,
    "tags/the_drop_ins_own_partition": _RESERVED,
}
"""Case → reason. A case that is missing here and differs fails, and so does one that is here and
turns out alike."""
