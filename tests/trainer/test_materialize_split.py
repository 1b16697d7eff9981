"""A pack cut along its sequence for the ranks that share it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.fields import IGNORED
from tests.trainer.materials import packed, sample, spec_of
from trainer.materialize import Experts, PackTensors, split_sequence

I = IGNORED  # noqa: E741 as in the specification


def bare(lengths: list[int], num_padding: int = 0) -> PackTensors:
    """A pack of these sequences, of which the last `num_padding` entries are padding."""
    size = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    labels = torch.arange(1, size + 1)
    labels[size - num_padding :] = I
    return PackTensors(
        input_ids=torch.arange(size)[None],
        labels=labels[None],
        position_ids=positions[None],
        cu_seq_lens=ends.to(torch.int32),
        max_length=max(lengths),
        num_padding=num_padding,
        columns={"is_weights": torch.full((1, size), 0.5), "logprobs": torch.ones(1, size)},
    )


def test_ex_6_7_two_ranks() -> None:
    pack = packed([sample([10, 11, 12], [20, 21])], cap=7)
    first, second = split_sequence(pack, 2)
    assert first.input_ids.tolist() == [[10, 11, 12, 20]]
    assert second.input_ids.tolist() == [[0, 0, 0, 0]]
    assert first.labels.tolist() == [[I, I, 20, 21]]
    assert second.labels.tolist() == [[I] * 4]
    assert first.position_ids.tolist() == [[0, 1, 2, 3]]
    assert second.position_ids.tolist() == [[0, 1, 2, 0]]
    assert first.cu_seq_lens.tolist() == second.cu_seq_lens.tolist() == [0, 4, 8]
    assert (first.num_padding, second.num_padding) == (0, 4)
    assert first.max_length == second.max_length == 4


def test_rg_29_the_longest_sequence_counts_what_was_added() -> None:
    (grown, *_) = split_sequence(bare([3, 2], num_padding=2), 4)
    assert (grown.cu_seq_lens.tolist(), grown.max_length) == ([0, 3, 8], 5)
    (added, *_) = split_sequence(bare([1]), 4)
    assert (added.cu_seq_lens.tolist(), added.max_length) == ([0, 1, 4], 3)


def test_every_column_is_padded_by_its_own_value() -> None:
    *_, last = split_sequence(bare([5]), 2)
    assert last["is_weights"].tolist() == [[0.5, 0.5, 1.0]]
    assert last["logprobs"].tolist() == [[1, 1, 0]]


def test_experts_and_three_axes_are_cut_too() -> None:
    row = sample(
        range(3), range(3), position_layout="mrope_3d",
        fields={
            "routed_experts": torch.ones(5, 4, dtype=torch.uint16),
            "position_ids": torch.arange(6).expand(3, 6),
        },
    )  # fmt: skip
    spec = spec_of([row], 5, experts=Experts(8, 2, 2))
    first, second = split_sequence(packed([row], spec), 2)
    assert first.routed_experts is not None
    assert second.routed_experts is not None
    assert first.routed_experts.shape == second.routed_experts.shape == (3, 2, 2)
    assert second.routed_experts[:, 0, 0].tolist() == [1, 1, 0]
    assert first.position_ids.tolist() == [[[0, 1, 2]]] * 3
    assert second.position_ids.tolist() == [[[3, 4, 0]]] * 3


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8), st.booleans()
)  # fmt: skip
def test_slices_put_together_are_the_pack(lengths: list[int], size: int, tail: bool) -> None:
    padding = lengths[-1] if tail and len(lengths) > 1 else 0
    pack = bare(lengths, padding)
    parts = split_sequence(pack, size)
    assert len({part.size for part in parts}) == 1
    joined = torch.cat([part.input_ids for part in parts], 1)
    assert torch.equal(joined[:, : pack.size], pack.input_ids)
    added = joined.shape[1] - pack.size
    assert 0 <= added < size
    assert sum(part.num_padding for part in parts) == padding + added
    assert sum(part.num_supervised for part in parts) == pack.num_supervised
    for part in parts:
        assert part.cu_seq_lens[-1].item() == joined.shape[1]
        assert part.max_length == part.cu_seq_lens.diff().max().item()


def test_one_rank_has_the_pack() -> None:
    (only,) = split_sequence(bare([3, 2]), 1)
    assert torch.equal(only.input_ids, bare([3, 2]).input_ids)
    assert only.cu_seq_lens.tolist() == [0, 3, 5]
