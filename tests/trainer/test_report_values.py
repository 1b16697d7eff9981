"""What is logged of a step, and how fast it was."""

from __future__ import annotations

import pytest

from trainer.ranks.types import RankReport
from trainer.report import OptimizerSteps, StepWork, Throughput, plane_share, step_values


def report(rank: int, *norms: float, **metrics: float) -> RankReport:
    steps = [{"grad_norm": norm, "loss": 1.0} for norm in norms]
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return RankReport(rank=rank, steps=steps, metrics=named, plane_time_s=0.0)


# -- names -----------------------------------------------------------------------------------


def test_a_step_has_the_names_of_8_8() -> None:
    values = step_values(
        times={"step": 2.0, "produce_batch": 0.5},
        data_info={
            "batch_size": 8, "training_samples": 8, "training_tokens": 99,
            "benchmark_end_time_s": 1.0, "rewards/mean": 0.5, "packing/efficiency": 0.9,
            "training/off_policy/staleness/mean": 1.0,
        },
        produced={"timing/task_n": 4, "async/failed_samples": 2, "rollout/produced_samples": 8},
        reports=[
            report(1, 5.0, packing_conversion_time_s=0.3, mismatch__k1=9.0),
            report(0, 1.0, 2.0, 3.0, packing_conversion_time_s=0.1, mismatch__k1=0.2,
                   rollout_is__mean=1.0, entropy__train=0.7, packing_other=1.0),
        ],
        throughput={"throughput/training_tgs": 10.0},
        evaluation={"accuracy": 0.25},
        sft={0: {"loss": 2.0}, 1: {"loss": 3.0}},
        others={"plane/share": 0.01},
    )  # fmt: skip
    assert values == {
        "time/step": 2.0,
        "time/produce_batch": 0.5,
        "response/batch_size": 8,
        "response/rewards/mean": 0.5,
        "response/packing/efficiency": 0.9,
        "response/packing/conversion_time_s_max": 0.3,
        "training/off_policy/staleness/mean": 1.0,
        "timing/task_n": 4,
        "async/failed_samples": 2,
        "rollout/produced_samples": 8,
        "throughput/training_tgs": 10.0,
        "mismatch/k1": 0.2,
        "rollout_is/mean": 1.0,
        "entropy/train": 0.7,
        "entropy/rollout": 0.0,
        "train_metrics/worker_0/step_avg_grad_norm": 2.0,  # EX-8.7
        "train_metrics/worker_0/step_avg_loss": 1.0,
        "sft_train_metrics/worker_0/loss": 2.0,
        "eval/accuracy": 0.25,
        "plane/share": 0.01,
    }


def test_all_workers_are_shown_if_asked_for_and_rank_0_speaks_for_entropy() -> None:
    reports = [report(0, 1.0, entropy__rollout=0.4), report(1, 5.0, entropy__rollout=0.9)]
    values = step_values(times={}, reports=reports, sft={1: {"loss": 3.0}}, all_workers=True)
    assert values["train_metrics/worker_1/step_avg_grad_norm"] == 5.0
    assert values["sft_train_metrics/worker_1/loss"] == 3.0
    assert values["entropy/rollout"] == 0.4


def test_nothing_is_said_of_what_there_is_not() -> None:
    assert step_values(times={"step": 1.0}) == {"time/step": 1.0}


def test_a_mean_is_over_the_steps_that_have_the_value() -> None:
    steps = [{"loss": 1.0}, {"loss": 3.0, "max_memory": 5.0}]
    made = RankReport(rank=0, steps=steps, metrics={}, plane_time_s=0.0)
    values = step_values(times={}, reports=[made])
    assert values["train_metrics/worker_0/step_avg_loss"] == 2.0
    assert values["train_metrics/worker_0/step_avg_max_memory"] == 5.0


def test_ex_8_7_optimizer_steps_are_numbered_through() -> None:
    steps = OptimizerSteps(10)
    reports = [report(0, 1.0, 2.0, 3.0), report(1, 7.0)]
    entries = steps.entries(reports)
    assert [number for number, _ in entries] == [11, 12, 13]
    assert entries[1][1] == {
        "train_metrics/worker_0/grad_norm": 2.0,
        "train_metrics/worker_0/loss": 1.0,
    }
    assert steps.count == 13
    ((number, values),) = steps.entries([report(1, 9.0), report(0, 4.0)], all_workers=True)
    assert number == 14
    assert values["train_metrics/worker_0/grad_norm"] == 4.0
    assert values["train_metrics/worker_1/grad_norm"] == 9.0


# -- throughput ------------------------------------------------------------------------------

WORK = StepWork(
    trained_samples=3, trained_tokens=60, produced_samples=4, produced_tokens=120, produce_time_s=4
)
TIMES = {"step": 10.0, "training": 2.0, "produce_batch": 8.0}


def started(train: int = 3, rollout: int = 2) -> Throughput:
    throughput = Throughput(train_workers=train, rollout_workers=rollout)
    throughput.start(100.0)
    return throughput


def test_ex_8_2_throughput() -> None:
    assert started().of_step(WORK, TIMES, now=108.0) == {
        "throughput/e2e_effective_sgs": 0.125,
        "throughput/e2e_effective_tgs": 2.5,
        "throughput/effective_sgs": pytest.approx(0.1),
        "throughput/effective_tgs": pytest.approx(2.0),
        "throughput/training_tgs": pytest.approx(10.0),
        "throughput/rollout_sgs": 0.5,
        "throughput/rollout_tgs": 15.0,
    }


def test_e2e_is_over_all_steps_since_the_start_those_without_times_too() -> None:
    throughput = started()
    assert throughput.of_step(WORK, {"step": 1.0}, now=104.0) == {}
    values = throughput.of_step(WORK, TIMES, now=116.0)
    assert values["throughput/e2e_effective_tgs"] == pytest.approx(120 / 16 / 3)


@pytest.mark.parametrize(
    ("times", "now"),
    [
        ({"step": 10.0}, 108.0),
        ({"training": 2.0}, 108.0),
        ({"step": 0.0, "training": 2.0}, 108.0),
        ({"step": 10.0, "training": -1.0}, 108.0),
        (TIMES, 100.0),
        (TIMES, 99.0),
    ],
)
def test_without_a_time_the_group_is_left_out(times: dict[str, float], now: float) -> None:
    assert started().of_step(WORK, times, now=now) == {}


def test_before_the_start_the_group_is_left_out() -> None:
    throughput = Throughput(train_workers=3, rollout_workers=2)
    assert throughput.of_step(WORK, TIMES, now=108.0) == {}


def test_production_is_timed_by_the_producer_else_by_the_loop_else_0() -> None:
    silent = StepWork(trained_samples=3, trained_tokens=60, produced_samples=4, produced_tokens=120)
    assert started().of_step(silent, TIMES, now=108.0)["throughput/rollout_sgs"] == 0.25
    del_time = {"step": 10.0, "training": 2.0}
    assert started().of_step(silent, del_time, now=108.0)["throughput/rollout_tgs"] == 0.0


def test_no_workers_count_as_one() -> None:
    values = started(0, -1).of_step(WORK, TIMES, now=108.0)
    assert values["throughput/training_tgs"] == 30.0
    assert values["throughput/rollout_sgs"] == 1.0


# -- the plane's share -----------------------------------------------------------------------


def test_the_planes_share_is_of_each_step() -> None:
    plane = [0.01 * i for i in range(1, 21)]
    share = plane_share([*plane, 5.0], [1.0] * 20 + [0.0])
    assert (share.p50, share.p95, share.steps) == (pytest.approx(0.10), pytest.approx(0.19), 20)
    line = "plane: 10.00% of step time at the median, 19.00% at p95, over 20 steps"
    assert str(share) == line
    assert share.values()["plane_share_steps"] == 20


def test_no_step_has_no_share() -> None:
    assert str(plane_share([], [])) == "plane: no step was timed"
    assert plane_share([], []).p95 == 0.0
