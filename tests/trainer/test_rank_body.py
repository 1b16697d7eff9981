"""One rank's part of a batch: order of stages, metrics over ranks, columns that go back, errors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client, KeyNotFound
from dataplane.fields import IGNORED
from tests.deadline import eventually
from tests.trainer.materials import ex_2_1, ex_2_2, packed, sample, spec_of
from tests.trainer.ranks import BYPASS, RECOMPUTE, Ranks, scripted
from tests.trainer.reading import NotingClient, put, rows, work_of
from trainer.errors import PlanError
from trainer.loss import ImportanceConfig, LossConfig, correct, mismatch_metrics
from trainer.materialize import PackTensors
from trainer.plan import Topology
from trainer.ranks.collectives import PeerFailed
from trainer.ranks.stages import STAGES, Stage
from trainer.ranks.types import RankReport


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[tuple[Client, Callable[[], Client]]]:
    config = {**plane_settings, "host": "embedded"}
    name = f"body-{os.getpid()}"
    client = dataplane.init(config, name=name)
    yield client, lambda: dataplane.connect(name, config=config)
    client.close(destroy=True)


Plane = tuple[Client, Callable[[], Client]]


@contextmanager
def ranks_of(plane: Plane, count: int, *args: Any, **options: Any) -> Iterator[Ranks]:
    """Ranks that have joined the plane, each with a client that notes."""
    ranks = Ranks([NotingClient(plane[1]()) for _ in range(count)], *args, **options)
    try:
        yield ranks
    finally:
        ranks.close()
        assert all(trainee.closed for trainee in ranks.trainees)


def report(found: RankReport | Exception) -> RankReport:
    if isinstance(found, Exception):
        raise found
    return found


def noted(ranks: Ranks, rank: int = 0) -> Any:
    return ranks.bodies[rank]._client


def test_the_end_to_end_fixture_of_ex_2_1_and_ex_2_2(plane: Plane) -> None:
    """Section 10's fixture, from rows in a plane to what a model is trained with: EX-6.1."""
    samples = [ex_2_1(uid="e2e"), ex_2_2(uid="e2e")]
    put(plane[0], samples)
    with ranks_of(plane, 1) as ranks:
        found = report(*ranks.fit(work_of(samples, [[[0, 1]]], advantages=[1.5, -0.5], cap=16)))
        ((pack,), tokens) = ranks.trainees[0].seen[0]
        assert tokens == 7
        assert pack.labels[0].tolist() == [
            -100, -100, 20, 21, 22, -100, 20, 21, -100, -100, 22, 2, -100, -100, -100, -100,
        ]  # fmt: skip
        assert pack["advantages"][0].tolist() == [
            0, 0, 1.5, 1.5, 1.5, 0, -0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0, 0, 0,
        ]  # fmt: skip
        assert torch.equal(pack["old_logprobs"], scripted(pack))
        assert found.metrics["entropy/rollout"] == pytest.approx(1.6 / 7)
        assert found.metrics["entropy/train"] == pytest.approx(
            -float(scripted(pack).sum()) / 7, rel=1e-6
        )
        assert [*found.steps] == [{"loss": 1.0}]
        assert found.plane_time_s > 0
        assert found.metrics["packing_conversion_time_s"] > 0
        assert found.metrics["packing_pack_time_s"] > 0


def test_columns_of_stages_go_back_under_the_keys_of_their_rows(plane: Plane) -> None:
    samples = rows(5, uid="back")
    put(plane[0], samples)
    loss = replace(RECOMPUTE, kl="k3", kl_coef=0.1)
    values = Stage("values", lambda pack, _: pack.input_ids.float())
    with ranks_of(plane, 1, loss, stages=(*STAGES, values), cap=24) as ranks:
        report(*ranks.fit(work_of(samples, [[[0, 1], [2]], [[3, 4], []]])))
        assert noted(ranks).keys == [one.row.key for one in samples]  # each of them once
        assert [fields for _, fields in noted(ranks).puts] == [
            {"old_logprobs", "ref_logprobs", "values"}
        ] * 3
        trained = [pack for packs, _ in ranks.trainees[0].seen for pack in packs]
        assert len(trained) == 4
        for pack in trained:
            assert {"old_logprobs", "ref_logprobs", "values", "logprobs"} <= set(pack.columns)
    keys = [one.row.key for one in samples]
    names = ["old_logprobs", "ref_logprobs", "values"]
    got = plane[0].kv_batch_get(keys, "train", names, layout="list").fields
    for i, one in enumerate(samples):
        labels = one.fields["labels"]
        due = (-1 - labels.float() / 100).masked_fill(labels == IGNORED, 0.0)
        assert torch.equal(got["old_logprobs"][i], due)
        assert torch.equal(got["ref_logprobs"][i], due / 2)
        assert got["values"][i].tolist() == [0.0, *one.fields["input_ids"][:-1].tolist()]


def test_nothing_goes_back_where_that_is_off(plane: Plane) -> None:
    samples = rows(2, uid="off")
    put(plane[0], samples)
    with ranks_of(plane, 1, write_back=False) as ranks:
        report(*ranks.fit(work_of(samples, [[[0], [1]]])))
        assert noted(ranks).puts == []


def test_stages_know_the_columns_that_they_may_make() -> None:
    for name in ("labels", "nonsense"):
        with pytest.raises(ValueError, match=f"{name!r} is no column of a stage"):
            Stage(name, lambda pack, _: pack.labels)
    made: list[Stage] = [Stage("rm_scores", lambda pack, _: pack["advantages"])]
    assert made[0].due(BYPASS)


def test_without_stages_packs_stream_through_few_buffers(plane: Plane) -> None:
    samples = rows(12, uid="stream")
    put(plane[0], samples)
    with ranks_of(plane, 1, BYPASS, prefetch=2) as ranks:
        packs = [[[i] for i in range(6)], [[i] for i in range(6, 12)]]
        found = report(*ranks.fit(work_of(samples, packs)))
        assert ranks.bodies[0]._shelf.made <= 3
        assert noted(ranks).puts == []
        trained = [pack for packs, _ in ranks.trainees[0].seen for pack in packs]
        for place, pack in enumerate(trained):
            due = packed([samples[place]], spec_of(samples, 16))
            assert torch.equal(pack.input_ids, due.input_ids)
            assert torch.equal(pack["old_logprobs"], due["logprobs"])
        assert set(found.metrics) == {
            "entropy/rollout", "packing_conversion_time_s", "packing_pack_time_s",
        }  # fmt: skip
        tokens = sum(one.row.policy_len for one in samples)
        total = sum(float(one.fields["logprobs"].sum()) for one in samples)
        assert found.metrics["entropy/rollout"] == pytest.approx(-total / tokens, rel=1e-5)


def test_demonstrations_need_no_logprobs_and_others_do(plane: Plane) -> None:
    samples = [sample([1, 2], [3, 4], uid="demo", session=i) for i in range(2)]
    put(plane[0], samples)
    supervised = LossConfig(policy="policy_gradient", old_logprobs="rollout")
    with ranks_of(plane, 1, supervised) as ranks:
        found = report(*ranks.fit(work_of(samples, [[[0], [1]]])))
        assert len(found.steps) == 1
        assert "old_logprobs" not in ranks.trainees[0].seen[0][0][0].columns
    with ranks_of(plane, 1, BYPASS) as ranks:
        (error,) = ranks.fit(work_of(samples, [[[0], [1]]]))
        assert isinstance(error, ValueError)
        assert "have no logprobs" in str(error)


def test_a_rank_of_empty_packs_meets_the_others_in_the_same_reductions_rg_40(
    plane: Plane,
) -> None:
    """Metrics of two ranks are those of one that has all packs; the empty one is not counted."""
    samples = rows(4, uid="rg40")
    put(plane[0], samples)
    importance = ImportanceConfig(threshold=(1.3, 0.5), mode="truncate")
    loss = replace(RECOMPUTE, kl="k1", kl_coef=0.1, importance=importance)
    packs = [[[0, 1], [2]], [[3], []]]
    with ranks_of(plane, 1, loss, cap=24) as alone:
        due = report(*alone.fit(work_of(samples, packs)))
    with ranks_of(plane, 2, loss, cap=24) as ranks:
        empty = work_of([], [[[], []], [[], []]], batch=samples, global_tokens=[1, 1])
        first, second = map(report, ranks.fit(work_of(samples, packs), empty))
        assert noted(ranks, 1).keys == []
        assert noted(ranks, 1).puts == []
        for packs_of_step, _ in ranks.trainees[1].seen:
            for pack in packs_of_step:
                for name in ("logprobs", "old_logprobs", "ref_logprobs", "advantages"):
                    assert pack[name].tolist() == [[0.0] * 24]
                assert pack["is_weights"].tolist() == [[0.0] * 24]
        assert set(ranks.trainees[1].seen[0][0][0].columns) == set(
            ranks.trainees[0].seen[0][0][0].columns
        )
    names = {name for name in due.metrics if not name.startswith("packing")}
    assert {name.split("/")[0] for name in names} == {"entropy", "mismatch", "rollout_is"}
    assert "mismatch/mismatch_k3_kl" in names
    assert "rollout_is/rollout_is_seq_max_deviation" in names
    for name in names:
        assert first.metrics[name] == second.metrics[name]
        assert first.metrics[name] == pytest.approx(due.metrics[name], rel=1e-12), name
    # Against the formulas, over the three packs that supervise something.
    each = [
        mismatch_metrics(pack["old_logprobs"], pack["logprobs"], pack.mask)
        for packs_of_step, _ in alone.trainees[0].seen
        for pack in packs_of_step
    ]
    real = [metrics for metrics in each if metrics is not None]
    assert len(real) == 3
    for name, merge in (("kl", _mean), ("log_ppl_diff_max", max), ("log_ppl_diff_min", min)):
        numbers = [metrics[f"mismatch_{name}"] for metrics in real]
        assert first.metrics[f"mismatch/mismatch_{name}"] == pytest.approx(merge(numbers))


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_tokens_are_counted_again_over_ranks_where_correction_clears_labels(plane: Plane) -> None:
    samples = rows(6, uid="recount")
    put(plane[0], samples)
    # Ratios are exp(scripted - rollout), of rollouts in -4 to -2: about 2 to 15.
    importance = ImportanceConfig(threshold=(5.0, 0.0), mode="mask")
    loss = replace(RECOMPUTE, importance=importance)
    with ranks_of(plane, 2, loss) as ranks:
        works = [
            work_of(samples[:3], [[[0]], [[1], [2]]], batch=samples, global_tokens=[99, 99]),
            work_of(samples[3:], [[[0]], [[], [1]]], batch=samples, global_tokens=[99, 99]),
        ]
        found = list(map(report, ranks.fit(*works)))
        for step in range(2):
            left = 0
            for trainee in ranks.trainees:
                for pack in trainee.seen[step][0]:
                    whole = packed(
                        [one for one in samples if one.row.key in pack.keys], spec_of(samples)
                    )
                    kept = correct(
                        scripted(whole), whole["logprobs"], whole.mask, whole.cu_seq_lens,
                        importance,
                    )  # fmt: skip
                    assert torch.equal(pack.mask, kept.mask)
                    assert torch.equal(pack["is_weights"], kept.weights)
                    left += int(kept.mask.sum())
            assert {trainee.seen[step][1] for trainee in ranks.trainees} == {left}
            assert left > 0
        supervised = sum(one.row.policy_len for one in samples[:3]) + sum(
            one.row.policy_len for one in samples[3:5]
        )
        assert sum(ranks.trainees[0].seen[i][1] for i in range(2)) < supervised
        assert found[0].metrics["rollout_is/rollout_is_masked_fraction"] > 0
        # Entropies are of all tokens that were sampled, not of those that correction left.
        labels = torch.cat([one.fields["labels"][1:] for one in samples[:5]])
        real = labels[labels != IGNORED]
        assert found[0].metrics["entropy/train"] == pytest.approx(
            float((1 + real.double() / 100).mean()), rel=1e-5
        )
    # What went back is of before the correction.
    key = samples[0].row.key
    got = plane[0].kv_batch_get([key], "train", ["old_logprobs"], layout="list").fields
    assert (got["old_logprobs"][0] != 0).sum() == samples[0].row.policy_len


def test_replicas_share_a_part_and_one_of_them_writes(plane: Plane) -> None:
    samples = rows(2, uid="replicas")
    put(plane[0], samples)
    with ranks_of(plane, 2, topology=Topology(world_size=2, tensor=2)) as ranks:
        work = work_of(samples, [[[0], [1]]])
        list(map(report, ranks.fit(work, work)))
        assert [len(noted(ranks, rank).puts) for rank in range(2)] == [2, 0]
        # Both add their gradients: each weighs a token half as much.
        assert {t.seen[0][1] for t in ranks.trainees} == {2 * work.global_tokens[0]}


def test_a_plan_of_fewer_steps_is_carried_out_and_one_of_more_refused_rg_13(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    samples = rows(3, uid="rg13")
    put(plane[0], samples)
    with ranks_of(plane, 1) as ranks:
        with caplog.at_level(logging.INFO, "trainer.ranks.body"):
            assert len(report(*ranks.fit(work_of(samples, [[[0], [1], [2]]]))).steps) == 1
            assert "1 optimizer steps of 2" in caplog.text
            caplog.clear()
            assert len(report(*ranks.fit(work_of(samples, [[[0]], [[1], [2]]]))).steps) == 2
            assert caplog.text == ""
        asked = len(noted(ranks).keys)
        refused = {
            "3 optimizer steps": work_of(samples, [[[0]], [[1]], [[2]]]),
            "1024": work_of(samples, [[[0]]], cap=1024),
            "'advantages': 2": replace(work_of(samples, [[[0], [1], [2]]]), advantages=[1.0, 2.0]),
            "1 entries for 2": work_of(samples, [[[0]], [[1]]], global_tokens=[4]),
        }
        for word, work in refused.items():
            (error,) = ranks.fit(work)
            assert isinstance(error, ValueError)
            assert word in str(error)
            assert isinstance(error, PlanError) == (word == "3 optimizer steps")
        assert len(noted(ranks).keys) == asked
        assert len(ranks.trainees[0].seen) == 3
    with ranks_of(plane, 1, None) as ranks:
        (error,) = ranks.fit(work_of(samples, [[[0]]]))
        assert "no phase was begun" in str(error)


@pytest.mark.parametrize("parallel", ["replicated", "fsdp"])
@pytest.mark.parametrize("loss", [RECOMPUTE, BYPASS], ids=["looked-at", "streamed"])
def test_a_row_cleared_on_one_rank_stops_all_and_the_next_batch_works(
    plane: Plane, loss: LossConfig, parallel: str
) -> None:
    """The scenario of NeMo#3917: the others do not wait in a collective."""
    samples = rows(4, uid=f"gone-{parallel}-{loss.old_logprobs}")
    put(plane[0], samples)
    gone = samples[1].row.key
    plane[0].kv_clear([gone], "train")
    with ranks_of(plane, 2, loss, parallel=parallel) as ranks:
        other = work_of(samples[2:], [[[0], [1]]], batch=samples)
        first, second = ranks.fit(work_of(samples[:2], [[[0], [1]]], batch=samples), other)
        assert isinstance(first, KeyNotFound)
        assert first.keys == [gone]
        assert isinstance(second, PeerFailed)
        assert second.rank == 0
        assert gone in str(second)
        assert ranks.bodies[0].together.shares(first)
        assert [trainee.seen for trainee in ranks.trainees] == [[], []]
        again = work_of(samples[:1], [[[0], []]], batch=samples)
        assert all(len(report(one).steps) == 1 for one in ranks.fit(again, other))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_cleared_before_it_is_written_back_stops_all_before_weights_move(
    plane: Plane, rank: int
) -> None:
    samples = rows(4, uid=f"late{rank}")
    put(plane[0], samples)
    works = [work_of(samples[i : i + 2], [[[0]], [[1]]], batch=samples) for i in (0, 2)]
    gone = samples[2 * rank].row.key
    with ranks_of(plane, 2) as ranks:

        def clear(what: str, pack: PackTensors) -> None:
            if what == "logprobs" and gone in pack.keys:
                assert plane[0].kv_clear([gone], "train") == 1

        ranks.trainees[rank].hook = clear
        found = ranks.fit(*works)
        assert isinstance(found[rank], KeyNotFound)
        assert gone in str(found[rank])
        assert isinstance(found[1 - rank], PeerFailed)
        assert [trainee.seen for trainee in ranks.trainees] == [[], []]
        put(plane[0], samples[2 * rank : 2 * rank + 1])
        ranks.trainees[rank].hook = lambda _what, _pack: None
        assert all(len(report(one).steps) == 2 for one in ranks.fit(*works))


@pytest.mark.parametrize("what", ["logprobs", "train"])
def test_an_error_of_the_model_on_one_rank_is_one_of_all(plane: Plane, what: str) -> None:
    samples = rows(4, uid=f"model-{what}")
    put(plane[0], samples)
    works = [work_of(samples[i : i + 2], [[[0], [1]]], batch=samples) for i in (0, 2)]
    with ranks_of(plane, 2) as ranks:

        def fail(when: str, pack: PackTensors) -> None:
            if when == what and samples[3].row.key in pack.keys:
                raise FloatingPointError("too large")

        ranks.trainees[1].hook = fail
        first, second = ranks.fit(*works)
        assert isinstance(second, FloatingPointError)
        assert isinstance(first, PeerFailed)
        assert "FloatingPointError: too large" in str(first)
        ranks.trainees[1].hook = lambda _what, _pack: None
        assert all(len(report(one).steps) == 1 for one in ranks.fit(*works))


def test_write_backs_overlap_with_training_and_are_there_when_fit_returns(plane: Plane) -> None:
    samples = rows(3, uid="beside")
    put(plane[0], samples)
    with ranks_of(plane, 1) as ranks:
        client = noted(ranks)
        real = client.kv_batch_put
        training: list[str] = []

        def late(*args: Any, **named: Any) -> Any:
            # The put of a pack is held until the model trains: it would never come otherwise.
            deadline = time.monotonic() + 30
            while not training:
                assert time.monotonic() < deadline, "training waits for the write-back"
            return real(*args, **named)

        client.kv_batch_put = late
        ranks.trainees[0].hook = lambda what, _: training.append(what) if what == "train" else None
        report(*ranks.fit(work_of(samples, [[[0], [1], [2]]])))
        assert len(client.puts) == 3


def test_waiting_for_the_plane_is_told_and_hidden_calls_are_not(plane: Plane) -> None:
    samples = rows(4, uid="slow")
    put(plane[0], samples)

    def fit(place: int) -> float:
        slow = [samples[place].row.key]

        def before(keys: list[str]) -> None:
            if keys == slow:
                asked = time.monotonic()
                eventually(lambda: time.monotonic() - asked > 1.0, "the plane takes its time")

        client = NotingClient(plane[1](), before)
        ranks = Ranks([client], BYPASS)

        def train(_: str, pack: PackTensors) -> None:
            if samples[0].row.key in pack.keys:
                eventually(lambda: samples[1].row.key in client.keys, "the next pack is read")

        ranks.trainees[0].hook = train
        try:
            return report(*ranks.fit(work_of(samples, [[[0], [1], [2], [3]]]))).plane_time_s
        finally:
            ranks.close()

    assert fit(0) >= 1.0  # nobody can read the first pack ahead
    assert fit(1) < 0.5  # under the training of the first one


def test_other_batches_have_other_experts_in_their_padding_and_replicas_the_same(
    plane: Plane,
) -> None:
    with ranks_of(plane, 1) as ranks:
        body = ranks.bodies[0]
        drawn = [
            torch.randint(1 << 30, (4,), generator=body._chance(work_of([], [], train_step=step)))
            for step in (1, 1, 2)
        ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
