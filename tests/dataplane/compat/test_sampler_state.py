"""What a sampler remembers, as JSON and back."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.control import sampler_state
from transfer_queue.sampler import BaseSampler, RankAwareSampler, SeqlenBalancedSampler

from dataplane.errors import InvalidRequest


class Keeper(BaseSampler):
    """Keeps whatever it is given."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return [], []

    def save_checkpoint(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def there_and_back(kept: Any) -> Any:
    again = Keeper()
    sampler_state.restore(again, sampler_state.checked(sampler_state.saved(Keeper(kept))))
    return again.kept


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
state = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable | st.sampled_from(["$map", "$x"]), inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


@given(state)
def test_any_plain_state_comes_back_as_it_was(kept: Any) -> None:
    found = there_and_back(kept)
    assert found == kept
    assert repr(type(found)) == repr(type(kept))


def test_numbers_and_tuples_as_keys_and_floats_without_a_json_form_come_back() -> None:
    kept = {0: {("a", 1): [1, 2]}, "0": -0.0, "inf": -math.inf, "nan": math.nan}
    found = there_and_back(kept)
    assert found[0] == {("a", 1): [1, 2]}
    assert math.copysign(1, found["0"]) == -1
    assert found["inf"] == -math.inf
    assert math.isnan(found["nan"])


def test_a_restored_sampler_answers_as_the_saved_one() -> None:
    drawn = RankAwareSampler()
    rows = drawn.sample([4, 5, 6], 2, dp_rank=0, batch_index=3, task_name="t", partition_id="p")
    again = RankAwareSampler()
    sampler_state.restore(again, sampler_state.saved(drawn))
    assert again.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 3})
    assert (
        again.sample([9, 10], 2, dp_rank=0, batch_index=3, task_name="t", partition_id="p") == rows
    )


def test_shares_of_a_balanced_batch_come_back() -> None:
    class Tags:
        def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, int]]:
            return {index: {"total_lengths": index + 1} for index in indexes}

    def ask(sampler: Any, rank: int) -> Any:
        return sampler.sample(
            list(range(4)), 2, task_name="t", partition_id="p", partition=Tags(), dp_rank=rank,
            batch_index=0,
        )  # fmt: skip

    drawn = SeqlenBalancedSampler(dp_size=2)
    first = ask(drawn, 0)
    again = SeqlenBalancedSampler(dp_size=2)
    sampler_state.restore(again, sampler_state.saved(drawn))
    assert (ask(again, 0), ask(again, 1)) == (first, ask(drawn, 1))


@pytest.mark.parametrize("kept", [object(), defaultdict(list), b"x", {"a": [1, {2: print}]}])
def test_what_json_cannot_carry_is_refused_by_name(kept: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"Keeper.*save_checkpoint\(\)"):
        sampler_state.saved(Keeper(kept))


def test_the_state_of_another_class_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    text = sampler_state.saved(Keeper(7))
    sampler = RankAwareSampler()
    with caplog.at_level(logging.WARNING):
        sampler_state.restore(sampler, text)
    assert sampler.save_checkpoint() == RankAwareSampler().save_checkpoint()
    assert "Keeper" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"sampler": "Keeper"}',
        json.dumps({"sampler": "Keeper", "state": {"$map": [[1]]}}),
        json.dumps({"sampler": "Keeper", "state": {"$map": [[[1], 2]]}}),
        json.dumps({"sampler": "Keeper", "state": {"$class": "os.system"}}),
        '{"sampler": "Keeper", "state": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)  # fmt: skip
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="damaged"):
        sampler_state.checked(text)
