"""A batch of which rows are lost while ranks train it: given back, and said what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.errors import UnusableBatch
from trainer.loop import stages
from trainer.loop.stages import StepRecord
from trainer.ranks.outcome import RankError


class Ranks:
    """Ranks of which the first raises."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def onload(self) -> None:
        pass

    async def fit(self, works: Any) -> Any:
        raise RankError(0, self.kind, "has lost field 'input_ids' of key 'u_0_0'", usable=True)


class Buffer:
    def __init__(self) -> None:
        self.given_back: list[Any] = []

    async def give_back(self, sample: Any) -> None:
        self.given_back.append(sample)


async def trained(kind: str) -> tuple[Buffer, BaseException]:
    buffer, record = Buffer(), StepRecord(7)
    record.batch = cast("Any", SimpleNamespace(works=[]))
    record.sample = cast("Any", SimpleNamespace())
    parts = cast("Any", SimpleNamespace(dump=None, ranks=Ranks(kind)))
    lane = cast("Any", SimpleNamespace(buffer=buffer))
    with pytest.raises(RuntimeError) as error:
        await stages.train(parts, record, lane)
    assert buffer.given_back in ([], [record.sample])
    return buffer, error.value


async def test_a_lost_row_makes_the_batch_unusable_and_says_how_to_go_on() -> None:
    buffer, error = await trained("ValueLost")
    assert isinstance(error, UnusableBatch)
    assert len(buffer.given_back) == 1
    for words in ("step 7", "were lost while it was trained", "newest checkpoint", "'u_0_0'"):
        assert words in str(error)


async def test_any_other_error_of_a_rank_is_raised_as_it_is() -> None:
    buffer, error = await trained("KeyNotFound")
    assert isinstance(error, RankError)
    assert buffer.given_back == []
