"""What rows carry beside one number a token: experts, teachers, positions on three axes, images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane.fields import IGNORED
from tests.trainer.materials import (
    Sample,
    ex_2_1,
    fetch,
    got,
    members,
    packed,
    sample,
    spec_of,
)
from trainer.materialize import (
    Experts,
    Fetched,
    PackSpec,
    Read,
    Teacher,
    pack_plan,
    pack_rows,
    reads_for,
)
from trainer.plan import RankPlan
from trainer.trajectory import BatchTraits

I = IGNORED  # noqa: E741 as in the specification
EXPERTS = Experts(count=8, layers=2, topk=2)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def routed(prompt: int, response: int, session: int = 0, width: int = 4) -> Sample:
    """A row whose experts are 0, 1, 2, ... modulo 8, one row less than it has tokens."""
    tokens = prompt + response
    ids = torch.arange((tokens - 1) * width).reshape(tokens - 1, width) % 8
    fields = {"routed_experts": ids.to(torch.uint16)}
    return sample(range(prompt), range(response), session=session, fields=fields)


# -- routed experts --------------------------------------------------------------------------


def test_rg_03_an_empty_pack_is_routed_like_a_tail() -> None:
    rows = [routed(3, 4)]
    spec = spec_of(rows, experts=EXPERTS)
    for places in ([0], []):
        pack = packed(rows, spec, places=places, generator=seeded())
        found = pack.routed_experts
        assert found is not None
        assert (tuple(found.shape), found.dtype) == ((16, 2, 2), torch.uint16)
        assert 0 <= found.to(torch.int64).min() <= found.to(torch.int64).max() < 8


def test_rg_03_a_full_pack_beside_an_empty_one() -> None:
    """A plan [[0], [1], []] whose first row fills its pack to the last entry."""
    rows = [routed(8, 9), routed(3, 4, session=1)]
    spec = spec_of(rows, experts=EXPERTS)
    part = RankPlan([0, 1], [[[0], [1], []]])
    ((full, half, empty),) = pack_plan(
        part, members(rows), fetch(rows, spec), spec, advantages=[1.0, 1.0], generator=seeded()
    )
    assert [pack.num_padding for pack in (full, half, empty)] == [0, 10, 16]
    for pack, row, used in ((full, rows[0], 16), (half, rows[1], 6)):
        found = pack.routed_experts
        assert found is not None
        assert found.shape == (16, 2, 2)
        due = row.fields["routed_experts"].reshape(used, 2, 2)
        assert torch.equal(found[:used].to(torch.int64), due.to(torch.int64))
    assert empty.routed_experts is not None
    assert empty.routed_experts.shape == (16, 2, 2)


def test_a_full_pack_of_all_rows_is_not_the_whole_plan() -> None:
    """All that was fetched is one pack, to the last entry; the other pack is empty."""
    rows = [sample(range(8), range(9))]
    spec = spec_of(rows)
    part = RankPlan([0], [[[0], []]])
    ((full, empty),) = pack_plan(part, members(rows), fetch(rows, spec), spec, advantages=[1.0])
    assert full.labels[0].tolist() == [I] * 7 + list(range(9))
    assert empty.labels[0].tolist() == [I] * 16


def test_rows_keep_their_experts_and_padding_is_spread_over_all() -> None:
    rows = [routed(3, 4), routed(2, 3, session=1)]
    spec = spec_of(rows, 400, experts=EXPERTS)
    found = packed(rows, spec, generator=seeded()).routed_experts
    assert found is not None
    due = torch.cat([row.fields["routed_experts"] for row in rows]).reshape(10, 2, 2)
    assert torch.equal(found[:10].to(torch.int64), due.to(torch.int64))
    assert set(found[10:].flatten().tolist()) == set(range(8))


def test_the_same_generator_routes_padding_the_same() -> None:
    rows = [routed(3, 4)]
    spec = spec_of(rows, experts=EXPERTS)
    first, again = (packed(rows, spec, generator=seeded()).routed_experts for _ in range(2))
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)


def test_rg_22_an_exact_fit_has_its_experts_and_images() -> None:
    row = routed(8, 9)
    pixels = torch.rand(4, 3)
    whole = sample(
        range(8), range(9),
        fields={"routed_experts": row.fields["routed_experts"],
                "multi_modal_inputs": {"pixel_values": pixels}},
    )  # fmt: skip
    pack = packed([whole], spec_of([whole], experts=EXPERTS, multi_modal=True))
    assert pack.num_padding == 0
    assert pack.routed_experts is not None
    assert len(pack.routed_experts) == 16
    assert torch.equal(pack.multi_modal["pixel_values"], pixels)


def test_padding_cannot_be_routed_without_a_generator() -> None:
    rows = [routed(3, 4)]
    with pytest.raises(ValueError, match="needs a generator"):
        packed(rows, spec_of(rows, experts=EXPERTS))


def test_experts_are_left_where_they_are_unless_they_are_replayed() -> None:
    rows = [routed(3, 4)]
    spec = spec_of(rows)
    assert "routed_experts" not in reads_for(members(rows), spec)[0].arguments["select_fields"]
    assert packed(rows, spec).routed_experts is None


def test_skyrl_1908_experts_are_one_row_less_than_tokens() -> None:
    row = routed(3, 4)
    long = sample(range(3), range(4), fields={"routed_experts": torch.zeros(7, 4).to(torch.uint16)})
    spec = spec_of([row], experts=EXPERTS)
    with pytest.raises(ValueError, match=r"u_0_0.*routed_experts has 7 entries for 6 trained"):
        packed([long], spec, generator=seeded())


def test_experts_of_another_model_are_refused() -> None:
    spec = spec_of([routed(3, 4)], experts=EXPERTS)
    with pytest.raises(ValueError, match=r"u_0_0.*shape \[6\], not \[4\]"):
        packed([routed(3, 4, width=6)], spec, generator=seeded())
    wrong = sample(
        range(3), range(4), fields={"routed_experts": torch.full((6, 4), 8).to(torch.uint16)}
    )
    with pytest.raises(ValueError, match="ids 8 to 8, and the model has 8"):
        packed([wrong], spec, generator=seeded())


def test_ids_of_more_than_sixteen_bits_are_wide() -> None:
    assert Experts(65_536, 1, 1).dtype == torch.uint16
    assert Experts(65_537, 1, 1).dtype == torch.int64
    with pytest.raises(ValueError, match="layers is a number from 1 on"):
        Experts(8, 0, 2)


# -- teachers --------------------------------------------------------------------------------


def taught(teacher: Teacher, labels: list[int], **fields: Any) -> Any:
    """A pack of one row of these shifted labels."""
    first = labels[0] if labels[0] != I else 9
    ids = [first, *[token if token != I else 9 for token in labels]]
    row = sample(
        ids[:1], ids[1:], [int(token != I) for token in labels],
        fields={name: torch.tensor(value) for name, value in fields.items()},
    )  # fmt: skip
    return packed([row], spec_of([row], len(labels), teacher=teacher))


TOPK = [[102, 103], [104, 105]]


def test_ex_4_15_targets_stand_at_the_end() -> None:
    pack = taught(
        Teacher("topk", 2), [I, I, I, 21, 22], teacher_ids=TOPK, teacher_logprobs=[[0.5, 0.25]] * 2
    )
    assert pack["teacher_ids"].tolist() == [[[0, 0]] * 3 + TOPK]
    assert pack["teacher_logprobs"].tolist() == [[[0, 0]] * 3 + [[0.5, 0.25]] * 2]
    sampled = taught(Teacher("sampled"), [I, I, I, 21, 22], teacher_logprobs=[-0.75, -0.5])
    assert sampled["teacher_logprobs"].tolist() == [[0, 0, 0, -0.75, -0.5]]


def test_ex_4_15_a_row_under_a_hole_is_kept() -> None:
    pack = taught(Teacher("sampled"), [I, 20, I, 22], teacher_logprobs=[-1.0, -2.0, -3.0])
    assert pack["teacher_logprobs"].tolist() == [[0, -1, -2, -3]]


def test_targets_of_every_token_lose_the_first() -> None:
    pack = taught(Teacher("sampled"), [20, 21], teacher_logprobs=[-1.0, -2.0, -3.0])
    assert pack["teacher_logprobs"].tolist() == [[-2, -3]]


def test_supervision_without_a_target_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"u_0_0.*2 entries, and tokens before them are supervised"
    ):
        taught(Teacher("sampled"), [I, 20, I, 22], teacher_logprobs=[-1.0, -2.0])


def test_targets_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"teacher_logprobs of key 'u_0_0' has entries of shape"):
        taught(Teacher("sampled"), [I, 22], teacher_logprobs=[[-1.0, -2.0]])


def test_rg_20_padding_of_a_sampled_teacher_needs_no_top_k() -> None:
    spec = PackSpec(cap=16, teacher=Teacher("sampled"))
    pack = pack_rows([], fetch([], spec), spec)
    assert pack["teacher_logprobs"].tolist() == [[0.0] * 16]
    assert "teacher_ids" not in pack.columns


def test_ex_6_4_padding_of_a_teacher_with_k_alternatives() -> None:
    spec = PackSpec(cap=16, teacher=Teacher("topk", 2))
    pack = pack_rows([], fetch([], spec), spec)
    assert pack["teacher_logprobs"].shape == pack["teacher_ids"].shape == (1, 16, 2)
    assert not pack["teacher_logprobs"].any()
    assert not pack["teacher_ids"].any()
    assert pack["teacher_ids"].dtype == torch.int64


@pytest.mark.parametrize(("kind", "k"), [("topk", None), ("topk", 0), ("other", 1)])
def test_a_teacher_that_makes_no_sense_is_refused(kind: Any, k: Any) -> None:
    with pytest.raises(ValueError, match="teacher: "):
        Teacher(kind, k)


def test_teachers_in_the_worker_are_named_on_supervised_tokens() -> None:
    rows = [ex_2_1(), sample([1], [2, 3, 4], [1, 0, 1], logprobs=[0, 0, 0], session=1)]
    spec = spec_of(rows, 10, train_teachers=True)
    pack = packed(rows, spec, teachers=[1, 0])
    assert pack["teacher_indices"].tolist() == [[-1, -1, 1, 1, 1, 0, -1, 0, -1, -1]]
    assert pack["teacher_indices"].dtype == torch.int64
    assert packed(rows, spec, places=[], teachers=[1, 0])["teacher_indices"].tolist() == [[-1] * 10]


# -- positions -------------------------------------------------------------------------------


def imaged(axes: Any, prompt: int, response: int, session: int = 0) -> Sample:
    return sample(
        range(prompt),
        range(response),
        session=session,
        fields={"position_ids": torch.tensor(axes)},
        position_layout="mrope_3d",
    )


def test_ex_2_4_positions_of_a_prompt_go_on() -> None:
    pack = packed([imaged([[0, 1]] * 3, 2, 2)], cap=3, advantages=[0.25])
    assert pack.position_ids.tolist() == [[[0, 1, 2]]] * 3
    assert pack["advantages"].tolist() == [[0, 0.25, 0.25]]


def test_ex_2_5_rg_12_every_axis_goes_on_from_the_largest_of_all() -> None:
    """Of text, a vision start and 4 image tokens of one 1 x 4 x 4 grid merged 2 x 2."""
    axes = [[0, 1, 2, 2, 2, 2], [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]]
    pack = packed([imaged(axes, 6, 3)], cap=8)
    assert pack.position_ids.tolist() == [[[*axis, 4, 5]] for axis in axes]


def test_positions_of_a_whole_row_are_cut() -> None:
    axes = [[0, 1, 7, 8], [0, 1, 5, 8], [0, 1, 6, 8]]
    pack = packed([imaged(axes, 2, 2)], cap=3)
    assert pack.position_ids.tolist() == [[axis[:3]] for axis in axes]


def test_one_image_gives_all_rows_three_axes() -> None:
    batch = [sample([1], [2, 3]), imaged([[0, 1], [0, 4], [0, 2]], 2, 2, session=1)]
    spec = spec_of(batch, 8)
    mixed = packed(batch, spec)
    assert mixed.position_ids.shape == (3, 1, 8)
    assert mixed.position_ids[:, 0].tolist() == [
        [0, 1, 0, 1, 5, 0, 1, 2],
        [0, 1, 0, 4, 5, 0, 1, 2],
        [0, 1, 0, 2, 5, 0, 1, 2],
    ]
    text = packed(batch, spec, places=[0])
    assert text.position_ids[:, 0].tolist() == [[0, 1, 0, 1, 2, 3, 4, 5]] * 3


def test_ex_6_4_an_empty_pack_has_three_axes_if_the_batch_has() -> None:
    spec = PackSpec(cap=16, traits=BatchTraits(position_layout="mrope_3d"))
    pack = pack_rows([], fetch([], spec), spec)
    assert pack.position_ids.tolist() == [[list(range(16))]] * 3


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([[0, 1, 2, 3, 4]] * 3, "5 positions for 4 tokens"),
        ([[0, 1]] * 2, r"shape \[2, 2\], not \[3, N\]"),
    ],
)
def test_positions_that_do_not_fit_are_refused(axes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"u_0_0.*{words}"):
        packed([imaged(axes, 2, 2)])


def test_missing_positions_are_named() -> None:
    row = sample([1], [2], position_layout="mrope_3d")
    spec = spec_of([row])
    reads = [read for read in reads_for(members([row]), spec) if read.arguments.get("trim")]
    fetched = Fetched([(read, got([row], read)) for read in reads])
    with pytest.raises(ValueError, match=r"u_0_0.*no position_ids"):
        pack_rows(members([row]), fetched, spec, advantages=[1.0])


# -- images ----------------------------------------------------------------------------------


def test_images_are_joined_and_what_a_group_shares_is_read_once() -> None:
    shared = {"pixel_values": torch.ones(2, 3), "image_grid_thw": np.array([[1, 1, 2]], np.int32)}
    own = {"pixel_values": torch.zeros(1, 3), "num_img_tokens": [4]}
    rows = [
        sample([1], [2], session=0, shared="u"),
        sample([1], [2], session=1, shared="u", fields={"multi_modal_inputs": own}),
        sample([1], [2], session=2),
    ]
    spec = spec_of(rows, multi_modal=True)
    reads = reads_for(members(rows), spec)
    assert [(r.keys, r.places) for r in reads[1:]] == [(["u_1_0"], [1]), (["u"], [])]
    prompt = Sample({"multi_modal_inputs": shared}, sample([1], [2], session=9).row)

    def answer(read: Read) -> Any:
        if read.keys != ["u"]:
            return got(rows, read)
        found = got([prompt], Read(["u_9_0"], [], read.arguments))
        found.keys = ["u"]
        return found

    fetched = Fetched([(read, answer(read)) for read in reads])
    pack = pack_rows(members(rows), fetched, spec, advantages=[1.0] * 3)
    assert pack.multi_modal["pixel_values"].tolist() == [[1] * 3] * 2 + [[0] * 3]
    assert pack.multi_modal["image_grid_thw"].tolist() == [[1, 1, 2]] * 2
    assert pack.multi_modal["image_grid_thw"].dtype == torch.int64
    assert pack.multi_modal["num_img_tokens"] == [[4]]
    assert (
        pack_rows(members(rows), fetched, spec, places=[2], advantages=[1.0] * 3).multi_modal == {}
    )


def test_a_read_that_brought_less_is_refused() -> None:
    rows = [ex_2_1(), ex_2_1(session=1)]
    (read,) = reads_for(members(rows), spec_of(rows))
    answer = got(rows, read)
    answer.keys = answer.keys[:1]
    with pytest.raises(ValueError, match="are not here: u_1_0"):
        Fetched([(read, answer)])
