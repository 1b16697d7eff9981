"""All ranks as their driver holds them: one in a thread, two in actors, and ones that only act."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client
from tests.deadline import until
from tests.trainer.materials import sample
from tests.trainer.ranks import settings
from tests.trainer.reading import put, rows, work_of
from trainer.loss import LossConfig
from trainer.plan import Topology
from trainer.ranks.group import RankGroup
from trainer.ranks.outcome import Failure, Outcome, RankError, RankLost
from trainer.ranks.types import (
    ModelSettings,
    OptimizerSettings,
    Phase,
    PlaneAddress,
    RankSettings,
)

MODEL = ModelSettings(
    config={
        "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64,
    },
    dtype="float32",
)  # fmt: skip
PHASE = Phase(
    name="grpo",
    loss=LossConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.1),
    optimizer=OptimizerSettings(lr=1e-2),
)


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[tuple[Client, PlaneAddress]]:
    """An embedded plane, and where ranks find it."""
    name = f"group-{os.getpid()}"
    client = dataplane.init({**plane_settings, "host": "embedded"}, name=name)
    address = f"{plane_settings['runtime_dir']}/{client.plane_id}"
    yield client, PlaneAddress(name=name, address=address)
    client.close(destroy=True)


def real(plane: PlaneAddress, world_size: int = 1, **more: Any) -> RankSettings:
    """Ranks that train a model. Threads are left as they are: a local one shares this process."""
    given = {"threads": None, "reference": "frozen", "collective_timeout_s": 120.0, **more}
    return settings(world_size, plane=plane, model=MODEL, **given)


# -- one rank, in a thread -------------------------------------------------------------------


async def test_a_local_rank_trains_and_goes_on_after_an_error(
    plane: tuple[Client, PlaneAddress], tmp_path: Path
) -> None:
    client, address = plane
    samples = rows(4, uid="local")
    put(client, samples)
    work = work_of(samples, [[[0, 1]], [[2], [3]]], cap=24, advantages=[1.0, -1.0, 0.5, -0.5])
    group = await RankGroup.start(real(address, cap=24))
    try:
        with pytest.raises(RankError, match="no phase was begun") as unready:
            await group.fit([work])
        assert (unready.value.rank, unready.value.kind) == (0, "ValueError")
        await group.begin_phase(PHASE)
        (report,) = await group.fit([work])
        assert report.rank == 0
        assert len(report.steps) == 2
        assert report.steps[0]["grad_norm"] > 0
        assert report.steps[0]["step_consumed_tokens"] == sum(
            one.row.train_len for one in samples[:2]
        )
        # Weights have not moved when the first step looks at them.
        assert report.steps[0]["reduced_train_policy_ratio_abs_dev_mean"] == pytest.approx(0)
        assert report.steps[1]["reduced_train_policy_ratio_abs_dev_mean"] > 0
        assert report.metrics["entropy/train"] > 0
        got = client.kv_batch_get(
            [samples[0].row.key], "train", ["old_logprobs", "ref_logprobs"], layout="list"
        ).fields
        assert (got["old_logprobs"][0] != 0).sum() == samples[0].row.policy_len
        assert torch.equal(got["old_logprobs"][0], got["ref_logprobs"][0])

        client.kv_clear([samples[2].row.key], "train")
        with pytest.raises(RankError, match=samples[2].row.key) as cleared:
            await group.fit([work])
        assert cleared.value.kind == "KeyNotFound"
        assert cleared.value.usable
        assert "On rank 0" in cleared.value.__notes__[0]
        put(client, samples)
        assert len((await group.fit([work]))[0].steps) == 2
        with pytest.raises(ValueError, match="2 works for 1"):
            await group.fit([work, work])

        assert await group.publish_weights(3) > 0
        assert "weights@3" in client.kv_list_partitions()
        await group.save(tmp_path / "state")
        await group.load(tmp_path / "state")
        await group.export(tmp_path / "model")
        assert (tmp_path / "model" / "config.json").exists()
        await group.offload()
        await group.onload()
    finally:
        await group.close()
    await group.close()
    with pytest.raises(RuntimeError, match="closed"):
        await group.fit([work])
    client.kv_drop_partition("weights@3")


async def test_settings_that_do_not_fit_are_refused(
    plane: tuple[Client, PlaneAddress],
) -> None:
    _, address = plane
    with pytest.raises(ValueError, match="a process holds one rank, not 2"):
        await RankGroup.start(real(address, 2))
    with pytest.raises(ValueError, match="topology has 2"):
        await RankGroup.start(real(address), topology=Topology(world_size=2))
    with pytest.raises(ValueError, match="'threads'"):
        await RankGroup.start(real(address), kind="threads")  # type: ignore[arg-type]
    with pytest.raises(RankError, match="PlaneLost") as lost:
        await RankGroup.start(real(PlaneAddress(name="x", address="/tmp/0123456789abcdef")))
    assert not lost.value.usable


# -- ranks that only act ---------------------------------------------------------------------


@dataclass
class ActedRank:
    """A rank that answers what it is told to."""

    rank: int
    answer: Callable[[int, str, Any], Any] = lambda rank, verb, argument: Outcome((rank, argument))
    ended: bool = False
    shared: list[object] = field(default_factory=list[object])
    running: int = 0
    most: int = 0

    async def meet(self, world_size: int) -> tuple[str, int]:
        return "nowhere", world_size

    async def open(self, *_: Any) -> Outcome:
        return Outcome()

    async def ask(self, verb: str, *arguments: Any, **_: Any) -> Outcome:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            found = self.answer(self.rank, verb, arguments[0] if arguments else None)
            return await found if asyncio.iscoroutine(found) else found
        finally:
            self.running -= 1

    def share(self, value: object) -> object:
        self.shared.append(value)
        return ("reference", value)

    async def end(self) -> None:
        self.ended = True


def acted(
    answer: Callable[[int, str, Any], Any] | None = None,
    topology: Topology | None = None,
    grace_s: float = 30.0,
) -> tuple[RankGroup, list[ActedRank]]:
    topology = topology or Topology(world_size=2)
    ranks = [ActedRank(rank) for rank in range(topology.world_size)]
    for rank in ranks:
        rank.answer = answer or rank.answer
    return RankGroup(ranks, topology, grace_s=grace_s), ranks


def failed(error: Exception, *, shared: bool = False) -> Outcome:
    from trainer.ranks.collectives import PeersLost

    return Outcome(failure=Failure.of(error, shared=shared), is_alone=isinstance(error, PeersLost))


async def never() -> Outcome:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def test_replicas_are_given_one_reference_and_parts_are_shared_once_rg_17() -> None:
    group, ranks = acted(topology=Topology(world_size=4, tensor=2))
    works = [work_of([], [[[]]], global_tokens=[1], train_step=step) for step in (1, 2)]
    found: Sequence[Any] = await group.fit(works)
    assert ranks[0].shared == works  # 2 puts for 4 ranks
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert found[0][1] is found[1][1]
    assert found[2][1] is found[3][1]
    assert found[0][1] == ("reference", works[0])
    assert found[2][1] == ("reference", works[1])


async def test_an_error_that_all_ranks_share_leaves_the_group_usable() -> None:
    from trainer.ranks.collectives import PeerFailed

    def answer(rank: int, verb: str, argument: Any) -> Outcome:
        if verb == "fit":
            own = KeyError("gone")
            return failed(PeerFailed(1, "gone")) if rank == 0 else failed(own, shared=True)
        return Outcome(7)

    group, ranks = acted(answer)
    works = [work_of([], [[[]]], global_tokens=[1])] * 2
    with pytest.raises(RankError) as raised:
        await group.fit(works)
    assert (raised.value.rank, raised.value.kind) == (1, "KeyError")
    assert raised.value.usable
    assert await group.publish_weights(1) == 7
    assert not any(rank.ended for rank in ranks)


async def test_ranks_that_wait_for_one_that_failed_are_ended() -> None:
    group, ranks = acted(
        lambda rank, verb, _: failed(RuntimeError("bad")) if rank == 1 else never(), grace_s=0.05
    )
    with pytest.raises(RankError, match="rank 1: RuntimeError: bad; the ranks were ended") as bad:
        await group.offload()
    assert not bad.value.usable
    assert all(rank.ended for rank in ranks)
    with pytest.raises(RuntimeError, match="these ranks were ended"):
        await group.offload()
    await group.close()


async def test_of_a_lost_rank_the_loss_is_told_and_not_what_others_say_of_it() -> None:
    from trainer.ranks.collectives import PeersLost

    heard = asyncio.Event()

    async def dies() -> Outcome:
        await heard.wait()
        raise RankLost(1, "killed")

    def answer(rank: int, verb: str, argument: Any) -> Any:
        if rank == 1:
            return dies()
        heard.set()
        return failed(PeersLost("connection closed by peer"))

    group, ranks = acted(answer)
    with pytest.raises(RankLost, match="rank 1 is gone, and the others were ended"):
        await group.onload()
    assert all(rank.ended for rank in ranks)
    # Where no rank is gone, a group that has lost itself is of no use either.
    group, ranks = acted(lambda *_: failed(PeersLost("no answer")))
    with pytest.raises(RankError, match="rank 0: PeersLost"):
        await group.onload()
    assert all(rank.ended for rank in ranks)


async def test_a_call_that_is_given_up_ends_the_ranks_and_calls_do_not_mix() -> None:
    release = asyncio.Event()

    async def waits() -> Outcome:
        await release.wait()
        return Outcome(1)

    group, ranks = acted(lambda *_: waits())
    calls = [asyncio.ensure_future(group.publish_weights(i)) for i in range(3)]
    await until(lambda: all(rank.running for rank in ranks))
    release.set()
    assert await asyncio.gather(*calls) == [1, 1, 1]
    assert [rank.most for rank in ranks] == [1, 1]

    group, ranks = acted(lambda *_: never())
    call = asyncio.ensure_future(group.offload())
    await until(lambda: all(rank.running for rank in ranks))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert all(rank.ended for rank in ranks)


# -- two ranks in actors ---------------------------------------------------------------------


@pytest.mark.ray
async def test_two_ranks_in_actors_train_as_one_and_share_their_errors(
    ray_cluster: list[str], plane: tuple[Client, PlaneAddress], tmp_path: Path
) -> None:
    """Packs of 7, 3 and no supervised tokens (EX-6.13) over sharded weights; NeMo#3917."""
    client, address = plane
    samples = [
        sample([1, 2], range(3, 10), logprobs=[-4.0] * 7, uid="two"),
        sample([5], range(11, 14), logprobs=[-3.9] * 3, uid="two", session=1),
    ]
    put(client, samples)
    tokens = [7, 3]
    numbers = [1.0, -0.5]
    packs: list[list[list[int]]] = [[[0]], [[1]]]
    alone = work_of(samples, packs, advantages=numbers)
    works = [
        work_of(samples[:1], [[[0]], [[]]], batch=samples, global_tokens=tokens, advantages=[1.0]),
        work_of(samples[1:], [[[]], [[0]]], batch=samples, global_tokens=tokens, advantages=[-0.5]),
    ]
    one, group = await asyncio.gather(
        RankGroup.start(real(address)),
        RankGroup.start(real(address, 2, threads=1, parallel="fsdp"), kind="ray", num_cpus=0.5),
    )
    try:
        for each in (one, group):
            await each.begin_phase(PHASE)
        (due,) = await one.fit([alone])
        first, second = await group.fit(works)
        assert [first.rank, second.rank] == [0, 1]
        for report in (first, second):
            assert {n: v for n, v in report.metrics.items() if "packing" not in n} == pytest.approx(
                {n: v for n, v in due.metrics.items() if "packing" not in n}, rel=1e-5
            )
            for step, wanted in zip(report.steps, due.steps, strict=True):
                assert step["grad_norm"] > 0
                assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert first.plane_time_s > 0

        client.kv_clear([samples[1].row.key], "train")
        for _ in range(2):
            with pytest.raises(RankError) as cleared:
                await group.fit(works)
            assert (cleared.value.rank, cleared.value.kind) == (1, "KeyNotFound")
            assert samples[1].row.key in cleared.value.message
            assert cleared.value.usable
        put(client, samples)
        await one.fit([alone])
        await group.fit(works)
        for name, each in (("one", one), ("two", group)):
            await each.export(tmp_path / name)
        weights, wanted = (_weights(tmp_path / name) for name in ("two", "one"))
        assert weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.allclose(weights[name], tensor, atol=1e-5), name
        with pytest.raises(RankError, match="StateError") as missing:
            await group.load(tmp_path / "nothing")
        assert missing.value.usable
    finally:
        await one.close()
        await group.close()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
