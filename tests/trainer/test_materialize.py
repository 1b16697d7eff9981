"""Packs: the shift by one token, padding, what is present, with the specification's numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.fields import IGNORED
from tests.trainer.materials import ex_2_1, ex_2_2, fetch, members, packed, sample, spec_of
from trainer.materialize import (
    PackMemory,
    PackSpec,
    PackTensors,
    new_buffers,
    pack_plan,
    pack_rows,
    reads_for,
)
from trainer.plan import PlanConfig, RankPlan, make_plan
from trainer.trajectory import BatchTraits

I = IGNORED  # noqa: E741 as in the specification


def near(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


def whole_lengths(pack: PackTensors) -> set[int]:
    """Sizes along the sequence of every tensor; one if the pack is whole."""
    tensors = [pack.input_ids, pack.labels, *pack.columns.values()]
    return {tensor.shape[1] for tensor in tensors} | {pack.position_ids.shape[-1]}


def test_ex_6_1_rg_02_two_rows_in_one_pack() -> None:
    pack = packed([ex_2_1(), ex_2_2()], advantages=[1.5, -0.5])
    assert pack.input_ids.tolist() == [[10, 11, 12, 20, 21, 10, 11, 20, 21, 90, 91, 22, 0, 0, 0, 0]]
    assert pack.cu_seq_lens.tolist() == [0, 5, 12, 16]
    assert (pack.max_length, pack.num_padding) == (7, 4)
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]]
    assert pack.labels.tolist() == [[I, I, 20, 21, 22, I, 20, 21, I, I, 22, 2, I, I, I, I]]
    assert pack["advantages"].tolist() == [
        [0, 0, 1.5, 1.5, 1.5, 0, -0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0, 0, 0]
    ]
    logprobs = [0, 0, -0.1, -0.2, -0.3, 0, -0.1, -0.2, 0, 0, -0.3, -0.4, 0, 0, 0, 0]
    assert pack["logprobs"][0].tolist() == near(logprobs)
    assert (pack.num_supervised, pack.consumed_tokens, pack.size) == (7, 12, 16)
    assert pack.attention_ratio == 0.3515625
    assert pack.cu_seq_lens.dtype == torch.int32
    assert pack.input_ids.dtype == pack.labels.dtype == pack.position_ids.dtype == torch.int64
    assert pack["advantages"].dtype == pack["logprobs"].dtype == torch.float32


def test_rg_02_an_advantage_stands_where_a_label_does() -> None:
    pack = packed([ex_2_1(), ex_2_2()], advantages=[1.5, -0.5])
    assert pack["advantages"][0, 5:12].tolist() == [0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert bool((pack.labels[pack["advantages"] != 0] != IGNORED).all())


def test_rg_01_an_advantage_is_as_long_as_its_labels() -> None:
    holed = sample([10, 11, 12], [20, 21, 22], [1, 0, 1])
    pack = packed([holed], cap=5, advantages=[1.5])
    assert pack["advantages"].tolist() == [[0, 0, 1.5, 0, 1.5]]
    assert pack.labels.tolist() == [[I, I, 20, I, 22]]


def test_ex_6_2_rg_18_padding_reaches_every_tensor() -> None:
    first = sample([1, 2, 3], [20, 21], logprobs=[0.1, 0.2])
    second = sample([30, 31], [40], logprobs=[-0.3], session=1)
    pack = packed([first, second], advantages=[1.0, 2.0])
    assert pack.num_padding == 10
    assert whole_lengths(pack) == {16}
    assert pack.labels[0].tolist() == [I, I, 20, 21, I, 40] + [I] * 10
    assert pack["advantages"][0].tolist() == [0, 0, 1, 1, 0, 2] + [0] * 10
    assert pack["logprobs"][0].tolist() == near([0, 0, 0.1, 0.2, 0, -0.3] + [0] * 10)


def test_ex_6_3_padding_is_cut_into_chunks() -> None:
    pack = packed([ex_2_1()], cap=3072)
    assert pack.cu_seq_lens.tolist() == [0, 5, 1029, 2053, 3072]
    assert (pack.max_length, pack.num_padding) == (1024, 3067)
    assert pack.position_ids[0, 5:1029].tolist() == list(range(1024))
    assert pack.position_ids[0, 2053:].tolist() == list(range(1019))
    empty = packed([ex_2_1()], cap=3072, places=[])
    assert empty.cu_seq_lens.tolist() == [0, 1024, 2048, 3072]
    assert empty.num_padding == 3072


def test_ex_6_4_rg_40_an_empty_pack_has_what_the_batch_has() -> None:
    """A rank with no row of its own still enters the collective of every column."""
    batch = [ex_2_1()]
    spec = PackSpec(cap=16, traits=BatchTraits.of(members(batch)), columns=("ref_logprobs",))
    assert reads_for([], spec) == []
    empty = pack_rows([], fetch([], spec), spec)
    assert empty.input_ids.tolist() == [[0] * 16]
    assert empty.labels.tolist() == [[I] * 16]
    assert set(empty.columns) == {"advantages", "logprobs", "ref_logprobs"}
    assert all(column.tolist() == [[0.0] * 16] for column in empty.columns.values())
    assert (empty.num_padding, empty.num_supervised, empty.consumed_tokens) == (16, 0, 0)
    assert (empty.keys, empty.lengths) == ([], [])


def test_ex_6_5_mixed_presence_is_refused_by_key() -> None:
    rows = [ex_2_1(), sample([1], [2, 3], session=7)]
    with pytest.raises(ValueError, match=r"logprobs is to be all-present or all-absent.*u_7_0"):
        packed(rows)


def test_rg_19_a_column_that_no_row_has_is_as_long_as_the_pack() -> None:
    """Another pack of the batch has log-probs, so this one carries zeros."""
    batch = [sample([1, 2, 3], [20, 21]), sample([30, 31], [40], session=1), ex_2_1(session=2)]
    spec = spec_of(batch)
    pack = packed(batch, spec, places=[0, 1])
    assert pack["logprobs"].tolist() == [[0.0] * 16]
    assert packed(batch, spec, places=[2])["logprobs"][0, 4].item() == pytest.approx(-0.3)


def test_a_column_that_the_batch_lacks_is_left_out() -> None:
    assert set(packed([sample([1], [2, 3])]).columns) == {"advantages"}


def test_ex_6_5_a_row_that_the_pack_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="u_0_0 have 19 entries, and a pack holds 16"):
        packed([sample(range(10), range(10))])


def test_ex_6_6_an_exact_fit_has_no_padding() -> None:
    pack = packed([sample(range(8), range(9))])
    assert (pack.num_padding, pack.cu_seq_lens.tolist(), pack.max_length) == (0, [0, 16], 16)
    assert whole_lengths(pack) == {16}


def test_scenario_9_packing_shifts_before_it_joins() -> None:
    rows = [sample([1, 2, 3], [4, 5], session=i) for i in range(2)]
    pack = packed(rows, cap=8, advantages=[0.5, 0.5])
    assert pack.input_ids.tolist() == [[1, 2, 3, 4] * 2]
    assert pack.cu_seq_lens.tolist() == [0, 4, 8]
    assert pack.mask[0].nonzero().flatten().tolist() == [2, 3, 6, 7]
    assert pack["advantages"].tolist() == [[0, 0, 0.5, 0.5] * 2]


def test_rg_30_a_pack_depends_on_its_arguments_only() -> None:
    rows = [ex_2_1(), ex_2_2()]
    rich, poor = spec_of(rows), PackSpec(cap=16)
    first = packed(rows, rich)
    assert set(packed(rows, poor).columns) == {"advantages"}
    again = packed(rows, rich)
    assert set(again.columns) == {"advantages", "logprobs"}
    assert torch.equal(again["logprobs"], first["logprobs"])
    with pytest.raises(AttributeError):
        rich.cap = 8  # type: ignore[misc]


def test_packs_of_a_plan_hold_every_row_once_wherever_it_was_fetched() -> None:
    rows = [sample(range(100 * i, 100 * i + n), [1], session=i) for i, n in enumerate([3, 5, 2, 4])]
    plan = make_plan(
        [row.train_len for row in members(rows)],
        PlanConfig(cap=8, optimizer_steps=2, strategy="greedy", deterministic=True),
        dp_size=2,
    )
    keys: list[str] = []
    for rank in range(2):
        part = plan.for_rank(rank)
        mine = part.take(rows)
        spec = spec_of(rows, 8)
        advantages = part.take([0.0, 1.0, 2.0, 3.0])
        steps = pack_plan(part, members(mine), fetch(mine, spec), spec, advantages=advantages)
        assert [len(step) for step in steps] == [len(step) for step in part.packs]
        for pack in (pack for step in steps for pack in step):
            keys += pack.keys
            starts = pack.cu_seq_lens.tolist()
            for at, (key, length) in enumerate(zip(pack.keys, pack.lengths, strict=True)):
                which = int(key.split("_")[1])
                ids = pack.input_ids[0, starts[at] : starts[at + 1]].tolist()
                assert ids == list(range(100 * which, 100 * which + length))
                assert pack["advantages"][0, starts[at + 1] - 1].item() == which
    assert sorted(keys) == [f"u_{i}_0" for i in range(4)]


def test_a_part_in_pack_order_is_the_same_packs() -> None:
    part = RankPlan([4, 7, 9, 12], [[[2], [0, 3]], [[1], []]])
    turned = part.in_pack_order()
    assert turned == RankPlan([9, 4, 12, 7], [[[0], [1, 2]], [[3], []]])
    rows = [sample([session], [1, 2], session=session) for session in range(13)]

    def ids(some: RankPlan) -> list[Any]:
        mine = some.take(rows)
        spec = spec_of(mine, 8)
        steps = pack_plan(some, members(mine), fetch(mine, spec), spec, advantages=[1.0] * 4)
        return [pack.input_ids.tolist() for step in steps for pack in step]

    assert ids(part) == ids(turned)


def test_packs_of_one_plan_after_the_other_lie_in_the_same_memory() -> None:
    memory = PackMemory()
    addresses: list[list[int]] = []
    for round_, plan in enumerate([[[[0, 1], [2]]], [[[2], []]], [[[0], [1], [2]]]]):
        rows = [sample([round_], [i], session=i, logprobs=[-1.0]) for i in range(3)]
        spec = spec_of(rows, 4)
        part = RankPlan([0, 1, 2], plan)
        options: dict[str, Any] = {"advantages": [1.0, 2.0, 3.0]}
        fetched = fetch(rows, spec)
        found = pack_plan(part, members(rows), fetched, spec, memory=memory, **options)
        due = pack_plan(part, members(rows), fetched, spec, **options)
        for one, other in zip(found[0], due[0], strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.position_ids, other.position_ids)
            assert torch.equal(one["advantages"], other["advantages"])
            assert torch.equal(one["logprobs"], other["logprobs"])
        addresses.append([pack.labels.data_ptr() for pack in found[0]])
    assert addresses[0] == addresses[1]
    assert len(set(addresses[2])) == 3
    shorter = replace(spec, cap=2)
    ((other, *_),) = pack_plan(part, members(rows), fetched, shorter, memory=memory, **options)
    assert whole_lengths(other) == {2}


_row = st.tuples(st.integers(1, 6), st.lists(st.booleans(), max_size=8), st.floats(-3, 3))


@given(st.lists(_row, min_size=1, max_size=6), st.integers(0, 20), st.randoms())
def test_a_pack_holds_its_rows_and_nothing_else(
    rows: list[tuple[int, list[bool], float]], spare: int, random: Any
) -> None:
    samples = [
        sample(range(1, prompt + 2), range(50, 50 + len(mask)), mask, session=i)
        for i, (prompt, mask, _) in enumerate(rows)
    ]
    advantages = [advantage for _, _, advantage in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    used = sum(one.row.train_len for one in samples)
    pack = packed(samples, cap=used + spare, places=order, advantages=advantages)
    assert whole_lengths(pack) == {used + spare}
    starts = pack.cu_seq_lens.tolist()
    assert starts == sorted(set(starts))
    for at, place in enumerate(order):
        span = slice(starts[at], starts[at + 1])
        fields = samples[place].fields
        assert torch.equal(pack.input_ids[0, span], fields["input_ids"][:-1])
        assert torch.equal(pack.labels[0, span], fields["labels"][1:])
        due = torch.tensor(advantages[place]) * (fields["labels"][1:] != IGNORED)
        assert torch.equal(pack["advantages"][0, span], due)
        assert pack.position_ids[0, span].tolist() == list(range(starts[at + 1] - starts[at]))
    assert bool((pack.labels[0, used:] == IGNORED).all())
    assert not pack.input_ids[0, used:].any()
    assert pack.num_padding == spare


def test_rows_in_another_order_than_they_lie_are_the_same_rows() -> None:
    rows = [ex_2_1(), ex_2_2(), sample([5], [6, 7], logprobs=[-1.0, -2.0], session=2)]
    turned = packed(rows, places=[2, 0, 1], advantages=[1.0, 2.0, 3.0])
    due = packed([rows[2], rows[0], rows[1]], advantages=[3.0, 1.0, 2.0])
    assert torch.equal(turned.input_ids, due.input_ids)
    assert torch.equal(turned["logprobs"], due["logprobs"])
    assert torch.equal(turned["advantages"], due["advantages"])
    assert turned.keys == due.keys


def test_a_pack_that_is_read_alone_lies_over_the_callers_buffers() -> None:
    rows = [ex_2_1(), ex_2_2()]
    spec = spec_of(rows)
    into = new_buffers(spec)
    found = pack_rows(
        members(rows), fetch(rows, spec, one_pack=True, into=into), spec, advantages=[1.5, -0.5]
    )
    due = packed(rows, advantages=[1.5, -0.5])
    for name in ("input_ids", "labels"):
        assert getattr(found, name).data_ptr() == into[name].data_ptr()
        assert torch.equal(getattr(found, name), getattr(due, name))
    assert found["logprobs"].data_ptr() == into["logprobs"].data_ptr()
    assert torch.equal(found["logprobs"], due["logprobs"])


def test_a_pack_of_some_of_the_rows_never_takes_others_for_padding() -> None:
    """Two rows of 8 entries together, packs of 8: the first pack is one row and padding."""
    rows = [sample([1, 2], [3], session=0), sample([4, 5, 6], [7, 8, 9, 10], session=1)]
    pack = packed(rows, cap=8, places=[0])
    assert pack.input_ids.tolist() == [[1, 2, 0, 0, 0, 0, 0, 0]]
    assert pack.num_padding == 6


def test_advantages_that_differ_by_token_are_a_column() -> None:
    column = torch.tensor([0.0, 9.0, 9.0, 0.25, 0.5, 0.75])
    row = sample([1, 2, 3], [4, 5, 6], [1, 0, 1], fields={"advantages": column})
    pack = packed([row], spec_of([row], 6, columns=("advantages",)))
    assert pack["advantages"].tolist() == [[0, 0, 0.25, 0, 0.75, 0]]


def test_omni_602_a_filler_row_supervises_nothing() -> None:
    filler = sample([1] * 3, [1], [0], session=9, is_padding=True)
    pack = packed([sample([1, 2], [3]), filler], cap=8, advantages=[1.0, 5.0])
    assert pack.num_supervised == 1
    assert pack["advantages"].abs().sum() == 1


def test_verl_6675_a_row_without_a_response_trains_nothing() -> None:
    pack = packed([sample([1, 2, 3], [])])
    assert (pack.num_supervised, pack.consumed_tokens) == (0, 2)


def test_what_a_stage_computed_goes_back_as_rows() -> None:
    """Full alignment: index i belongs to token i, and nothing predicts the first."""
    pack = packed([ex_2_1(), ex_2_2()])
    rows = pack.rows_of(torch.arange(1.0, 17.0)[None])
    assert rows["u_0_0"].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["u_1_0"].tolist() == [0, 6, 7, 8, 9, 10, 11, 12]
    back = {"old_logprobs": rows["u_0_0"]}
    row = sample([10, 11, 12], [20, 21, 22], fields=back)
    again = packed([row], spec_of([row], 5, columns=("old_logprobs",)))
    assert again["old_logprobs"].tolist() == [[1, 2, 3, 4, 5]]


def test_one_line_for_a_sequence_context_and_for_flash_attention() -> None:
    pack = packed([ex_2_1(), ex_2_2()])
    context = pack.sequence_context()
    assert set(context) == {
        "input_ids", "position_ids", "num_padding", "cu_seq_lens_q", "cu_seq_lens_k",
        "max_length_q", "max_length_k",
    }  # fmt: skip
    assert pack.varlen()["cu_seq_lens_q"] is pack.cu_seq_lens
    assert pack.varlen()["max_length_k"] == 7
    assert pack.model_inputs()["use_cache"] is False


def test_moving_a_pack_leaves_nothing_behind() -> None:
    pack = packed([ex_2_1()]).to("meta")
    tensors = [pack.input_ids, pack.labels, pack.position_ids, pack.cu_seq_lens]
    assert {t.device.type for t in [*tensors, *pack.columns.values()]} == {"meta"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "labels has 4 entries for 5 trained"),
        ({"logprobs": torch.zeros(4)}, "logprobs has 3 entries for 5 trained"),
        ({"input_ids": torch.zeros(7, dtype=torch.int64)}, "has 7 tokens, and its tag seq_len"),
    ],
)
def test_fields_that_do_not_fit_are_named_with_their_key(change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"u_0_0.*{words}"):
        packed([ex_2_1(fields=change)])


def test_a_row_of_one_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match=r"u_0_0.*has two at least"):
        packed([sample([], [7])])


@pytest.mark.parametrize("advantages", [None, [1.0], [1.0, math.nan]])
def test_advantages_that_are_missing_are_refused(advantages: Any) -> None:
    with pytest.raises(ValueError, match="advantages"):
        packed([ex_2_1(), ex_2_2()], advantages=advantages)


def test_rows_that_did_not_come_are_named() -> None:
    spec = spec_of([ex_2_1()])
    with pytest.raises(ValueError, match=r"u_0_0.*was not fetched"):
        pack_rows(members([ex_2_1()]), fetch([], spec), spec, advantages=[1.0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cap": 0}, "cap is a number from 1 on"),
        ({"columns": ("nonsense",)}, "'nonsense' is no further column; those are advantages"),
        ({"columns": ("logprobs",)}, "'logprobs' is no further column"),
        ({"columns": ("values", "values")}, "named twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackSpec(**{"cap": 16, **settings})


def test_a_column_that_is_not_there_is_said_with_those_that_are() -> None:
    pack = packed([ex_2_1()])
    with pytest.raises(KeyError, match="no column 'values'; it has logprobs, advantages"):
        pack["values"]
    with pytest.raises(ValueError, match="column 'values' has shape"):
        pack.with_columns(values=torch.zeros(1, 3))
