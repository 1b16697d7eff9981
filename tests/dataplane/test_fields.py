"""The table of fields and tags, and `align` with the exact numbers of the specification."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.codec.shapes import ITEM_BYTES
from dataplane.errors import InvalidRequest
from dataplane.fields import (
    ALIGNMENTS,
    DERIVED_FIELDS,
    KNOWN_FIELDS,
    PROMPT_STATUSES,
    PROMPT_TAGS,
    TRAJECTORY_STATUSES,
    TRAJECTORY_TAGS,
    align,
    pad_value,
    ragged_dim,
)

CONTAINERS = {"list": list, "numpy": np.array, "torch": torch.tensor}


def make(kind: str, values: list[Any]) -> Any:
    return CONTAINERS[kind](values)


def as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    ("prompt_len", "full", "shifted", "fill"),
    [
        # Scenario 9: prompt p0 p1 p2, response r0 r1.
        (3, [-100, -100, -100, 21, 22], [-100, -100, 21, 22], -100),
        (3, [0.0, 0.0, 0.0, 1.5, 1.5], [0.0, 0.0, 1.5, 1.5], 0.0),
        (3, [0.0, 0.0, 0.0, -0.25, -0.5], [0.0, 0.0, -0.25, -0.5], 0.0),
        (3, [0, 0, 0, 1, 1], [0, 0, 1, 1], 0),
        # EX-2.1
        (3, [-100, -100, -100, 20, 21, 22], [-100, -100, 20, 21, 22], -100),
        (3, [0.0, 0.0, 0.0, -0.1, -0.2, -0.3], [0.0, 0.0, -0.1, -0.2, -0.3], 0.0),
        # EX-2.2, a tool turn in the middle
        (
            2,
            [-100, -100, 20, 21, -100, -100, 22, 2],
            [-100, 20, 21, -100, -100, 22, 2],
            -100,
        ),
        (
            2,
            [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
            [0.0, -0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
            0.0,
        ),
        # EX-2.3, a hole
        (3, [-100, -100, -100, 20, -100, 22], [-100, -100, 20, -100, 22], -100),
        # EX-2.4
        (2, [-100, -100, 102, 103], [-100, 102, 103], -100),
    ],
)
def test_full_shifted_and_response_hold_the_same_tokens(
    kind: str, prompt_len: int, full: list[Any], shifted: list[Any], fill: float
) -> None:
    rows = {"full": full, "shifted": shifted, "response": full[prompt_len:]}
    for from_, values in rows.items():
        for to, expected in rows.items():
            given_ = make(kind, values)
            got = align(given_, from_, to, prompt_len=prompt_len, total_len=len(full), fill=fill)
            assert type(got) is type(given_)
            assert as_list(got) == as_list(make(kind, expected))
            assert as_list(given_) == as_list(make(kind, values)), "the source is left alone"
            if kind != "list":
                assert got.dtype == given_.dtype


def test_the_next_token_layout_of_scenario_9() -> None:
    ids, labels = [10, 11, 12, 20, 21], [-100, -100, -100, 20, 21]
    logprobs, advantage = [0.0, 0.0, 0.0, -0.1, -0.2], 0.75

    def shift(values: list[Any], fill: float) -> list[Any]:
        return align(values, "full", "shifted", prompt_len=3, total_len=5, fill=fill)

    targets = shift(labels, -100)
    assert ids[:-1] == [10, 11, 12, 20]
    assert targets == [-100, -100, 20, 21]
    assert shift(logprobs, 0.0) == [0.0, 0.0, -0.1, -0.2]
    assert shift([0.0, 0.0, 0.0, advantage, advantage], 0.0) == [0.0, 0.0, 0.75, 0.75]
    # Two such samples packed, shifted before packing: trained labels at 2, 3, 6, 7.
    packed = targets + targets
    assert len(packed) == 8
    assert [i for i, label in enumerate(packed) if label != -100] == [2, 3, 6, 7]
    # The full layout packed: trained tokens at 3, 4, 8, 9.
    assert [i for i, label in enumerate(labels + labels) if label != -100] == [3, 4, 8, 9]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    ("suffix", "to", "expected"),
    [
        ([7, 8, 9], "full", [0, 0, 0, 7, 8, 9]),
        ([7, 8, 9], "shifted", [0, 0, 7, 8, 9]),
        ([7, 8, 9], "response", [0, 7, 8, 9]),
        ([7, 8, 9], "suffix", [7, 8, 9]),
        ([4, 5, 6, 7, 8, 9], "full", [4, 5, 6, 7, 8, 9]),
        ([4, 5, 6, 7, 8, 9], "shifted", [5, 6, 7, 8, 9]),
        ([4, 5, 6, 7, 8, 9], "response", [6, 7, 8, 9]),
    ],
)
def test_a_suffix_ends_at_the_last_token(
    kind: str, suffix: list[int], to: Any, expected: list[int]
) -> None:
    got = align(make(kind, suffix), "suffix", to, prompt_len=2, total_len=6, fill=0)
    assert as_list(got) == expected


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_alignment_is_a_suffix_already(kind: str) -> None:
    for from_, length in (("full", 5), ("shifted", 4), ("response", 2)):
        row = make(kind, list(range(length)))
        assert align(row, from_, "suffix", prompt_len=3, total_len=5, fill=0) is row


def test_teacher_rows_of_several_columns_keep_them() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    for kind in ("numpy", "torch"):
        got = align(make(kind, rows), "suffix", "shifted", prompt_len=2, total_len=5, fill=0.0)
        assert as_list(got) == [[0.0, 0.0], [0.0, 0.0], *rows]
        back = align(got, "shifted", "response", prompt_len=3, total_len=5, fill=0.0)
        assert as_list(back) == rows


@pytest.mark.parametrize("kind", CONTAINERS)
def test_empty_rows_and_empty_parts(kind: str) -> None:
    empty = make(kind, [1])[:0]
    for from_ in ALIGNMENTS:
        for to in ALIGNMENTS:
            assert len(align(empty, from_, to, prompt_len=0, total_len=0, fill=0)) == 0
    # A row without a response, and one without a prompt.
    assert as_list(align(empty, "response", "full", prompt_len=2, total_len=2, fill=9)) == [9, 9]
    assert as_list(align(empty, "suffix", "shifted", prompt_len=1, total_len=3, fill=9)) == [9, 9]
    full = make(kind, [1, 2])
    assert as_list(align(full, "full", "response", prompt_len=0, total_len=2, fill=0)) == [1, 2]
    assert len(align(full, "full", "response", prompt_len=2, total_len=2, fill=0)) == 0
    one = make(kind, [5])
    assert len(align(one, "full", "shifted", prompt_len=1, total_len=1, fill=0)) == 0


def test_every_dtype_survives() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool):
        row = torch.ones(2, dtype=dtype)
        got = align(row, "response", "full", prompt_len=1, total_len=3, fill=0)
        assert got.dtype == dtype
        assert got.float().tolist() == [0.0, 1.0, 1.0]
    labels = torch.tensor([20], dtype=torch.int32)
    assert align(labels, "response", "full", prompt_len=1, total_len=2, fill=-100).tolist() == [
        -100,
        20,
    ]
    nan = align(np.ones(1, np.float32), "response", "full", prompt_len=1, total_len=2, fill=np.nan)
    assert np.isnan(nan[0])
    assert align((1,), "response", "full", prompt_len=1, total_len=2, fill=0) == (0, 1)


@given(
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from(ALIGNMENTS[:3]),
    st.sampled_from(ALIGNMENTS[:3]),
    st.sampled_from(sorted(CONTAINERS)),
)
def test_there_and_back_loses_only_what_has_no_place(
    prompt: int, response: int, from_: Any, to: Any, kind: str
) -> None:
    total = prompt + response
    lengths = {"full": total, "shifted": max(total - 1, 0), "response": response}

    def convert(row: Any, a: Any, b: Any) -> Any:
        return align(row, a, b, prompt_len=prompt, total_len=total, fill=-1)

    # Entry values are the tokens they belong to, whatever the alignment.
    tokens = list(range(total))
    row = make(kind, [0, *tokens])[1:][total - lengths[from_] :]
    there = convert(row, from_, to)
    assert len(there) == lengths[to]
    first_kept = total - min(lengths[from_], lengths[to])
    start = total - lengths[to]
    assert as_list(there) == [t if t >= first_kept else -1 for t in range(start, total)]
    back = convert(there, to, from_)
    assert len(back) == len(row)
    start = total - lengths[from_]
    assert as_list(back) == [t if t >= first_kept else -1 for t in range(start, total)]


@pytest.mark.parametrize(
    ("values", "from_", "lengths", "message"),
    [
        # Scenario 9: 5 tokens with 4 log-probs.
        (
            [0.0] * 4,
            "full",
            (3, 5),
            "logprobs: 4 entries, but 'full' alignment has 5 (prompt_len 3",
        ),
        ([0.0] * 5, "shifted", (3, 5), "logprobs: 5 entries, but 'shifted' alignment has 4"),
        ([0.0] * 5, "response", (3, 5), "logprobs: 5 entries, but 'response' alignment has 2"),
        ([0.0] * 6, "suffix", (3, 5), "logprobs: a suffix of 6 entries in a row of total_len 5"),
        ([0.0] * 5, "full", (6, 5), "logprobs: prompt_len 6 is more than total_len 5"),
        ([0.0] * 5, "full", (-1, 5), "prompt_len is a number of tokens, not -1"),
        ([0.0] * 5, "full", (3, 5.0), "total_len is a number of tokens, not 5.0"),
        ([0.0] * 5, "full", (True, 5), "prompt_len is a number of tokens, not True"),
        ([0.0] * 5, "left", (3, 5), "unknown alignment 'left'; one of full, shifted, response"),
        (np.float32(1), "full", (3, 5), "logprobs: a list, an array or a tensor of one entry"),
        (torch.tensor(1.0), "full", (3, 5), "due, not a scalar"),
        ("abcde", "full", (3, 5), "due, not str"),
        (None, "full", (3, 5), "due, not NoneType"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    values: Any, from_: Any, lengths: tuple[Any, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        align(
            values, from_, "shifted",
            prompt_len=lengths[0], total_len=lengths[1], fill=0.0, name="logprobs",
        )  # fmt: skip
    assert message in str(caught.value)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unknown alignment 'prompt'"):
        align([1], "full", "prompt", prompt_len=0, total_len=1, fill=0)


@pytest.mark.parametrize(
    ("row", "fill"),
    [
        (np.ones(1, np.uint16), -100),
        (torch.ones(1, dtype=torch.uint8), -100),
        (np.ones(1, np.int64), 0.5),
        (torch.ones(1, dtype=torch.int64), 0.5),
        (torch.ones(1, dtype=torch.bool), -100),
        (np.ones(1, np.int64), np.nan),
        (np.ones(1, np.int64), None),
        (torch.ones(1), None),
        ([[1, 2]], 0),
    ],
)
def test_a_fill_that_the_row_cannot_hold_is_refused(row: Any, fill: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"labels: (fill .* does not fit|nested lists)"):
        align(row, "response", "full", prompt_len=1, total_len=2, fill=fill, name="labels")


def test_the_table_names_every_field_of_the_design() -> None:
    known = (
        "input_ids labels logprobs position_ids response_model_steps routed_experts teacher_ids "
        "teacher_logprobs multi_modal_inputs messages reward extra rm_scores old_logprobs "
        "ref_logprobs entropy values token_level_rewards advantages returns"
    )
    derived = "prompts responses response_mask loss_mask attention_mask"
    assert set(KNOWN_FIELDS) == set(known.split())
    assert set(DERIVED_FIELDS) == set(derived.split())


@pytest.mark.parametrize("table", [KNOWN_FIELDS, DERIVED_FIELDS])
def test_every_entry_is_consistent(table: Any) -> None:
    for name, field in table.items():
        assert field.name == name
        assert field.dtype in ITEM_BYTES
        assert field.align in (*ALIGNMENTS, None)
        assert field.doc
        assert field.read_by
        assert (field.dtype == "object") == (field.ragged_dim is None) == (field.shape == "")
        start = {"full": "[N", "shifted": "[N-1", "response": "[R", "suffix": "[S"}
        if field.align is not None:
            assert field.shape.startswith(start[field.align])
        if field.dtype != "object":
            padded = torch.tensor(field.pad).to(getattr(torch, field.dtype))
            assert padded.item() == field.pad
    with pytest.raises(TypeError):
        table["new"] = None


def test_only_our_own_stages_write_known_fields_and_nobody_the_derived() -> None:
    assert all(field.written_by for field in KNOWN_FIELDS.values())
    assert not any(field.written_by for field in DERIVED_FIELDS.values())


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("input_ids", 1, 0),
        ("position_ids", 1, 0),
        ("position_ids", 2, 1),
        ("position_ids", 3, 2),
        ("routed_experts", 2, 0),
        ("routed_experts", 3, 0),
        ("teacher_ids", 1, 0),
        ("teacher_ids", 2, 0),
        ("teacher_logprobs", 2, 0),
        ("rm_scores", 1, 0),
        ("reward", 0, None),
        ("reward", 1, 0),
        ("never heard of", 0, None),
        ("never heard of", 1, 0),
        ("never heard of", 3, 2),
        ("routed_experts", 0, None),
    ],
)
def test_ragged_dim_is_declared_or_the_last(name: str, rank: int, expected: int | None) -> None:
    assert ragged_dim(name, rank) == expected


def test_pad_values() -> None:
    assert pad_value("labels") == -100
    assert pad_value("input_ids") == 0
    assert pad_value("never heard of") == 0
    logprob = pad_value("logprobs")
    assert logprob == 0.0
    assert isinstance(logprob, float)


def test_tags_and_statuses_are_those_of_the_design() -> None:
    assert TRAJECTORY_STATUSES == ("completed", "failed", "aborted", "filtered", "expired")
    assert PROMPT_STATUSES == ("pending", "running", "finished", "failure")
    assert set(PROMPT_TAGS) == {"is_prompt", "status", "global_steps", "uid", "n", "attempt"}
    wanted = (
        "uid session_id index attempt status prompt_len response_len seq_len policy_len num_turns "
        "global_steps min_global_steps max_global_steps policy_spans score advantage finish_reason "
        "error_msg is_padding task_name data_source ids_source logprob_kind group_generate_time_s"
    )
    assert set(wanted.split()) <= set(TRAJECTORY_TAGS)
    for table in (PROMPT_TAGS, TRAJECTORY_TAGS):
        assert all(tag.name == name and tag.type and tag.doc for name, tag in table.items())
        assert not set(table) & {"and", "or", "not"}, "these names cannot be queried"


def test_the_table_needs_no_torch() -> None:
    code = "import sys, dataplane.fields; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
