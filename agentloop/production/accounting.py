"""What a window of production adds up to. No I/O.

Owns the counters of one window: each is told once and begins anew. Source of what is counted:
XTuner's ProduceBatchResult.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentloop.groups.outcome import UNKNOWN_FAILURE, GroupOutcome
from agentloop.trajectory.state import Status


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """How long groups took, in seconds; all None if no group says so."""

    count: int | None = None
    mean_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    p99_p50_ratio: float | None = None
    """Infinite if the median is 0."""

    @classmethod
    def of(cls, times: Iterable[float]) -> GroupTimes:
        """Of the groups that took these times.

        Example: of [0.5, 1.0] the median is 1.0: the upper of the two in the middle.
        """
        ordered = sorted(times)
        if not ordered:
            return cls()
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        ratio = p99 / p50 if p50 else math.inf
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p99, ratio)


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """One window of production: what was taken, and everything that came meanwhile."""

    groups: tuple[str, ...]
    """Uids of the groups taken for training."""
    status: Literal["normal", "expired_batch"] = "normal"
    group_gen_count: int | None = None
    group_gen_mean_s: float | None = None
    group_gen_p50_s: float | None = None
    group_gen_p99_s: float | None = None
    group_gen_p99_p50_ratio: float | None = None
    """Times of the groups taken; all None if none says its time."""
    group_gen_pause_time_s: float | None = None
    """None if nothing was paused and no group says its time."""
    leftover_init: int = 0
    leftover_completed: int = 0
    leftover_aborted: int = 0
    leftover_expired: int = 0
    """Groups that are left after the take."""
    failed_samples: int = 0
    """Trajectories of groups in which one failed."""
    filtered_samples: int = 0
    """Trajectories of groups that were refused."""
    raw_rewards_sum: float = 0.0
    raw_rewards_count: int = 0
    """Scores of completed groups, refused ones included."""
    produced_samples: int = 0
    produced_tokens: int = 0
    """All that came, whatever became of it."""
    produce_time_s: float = 0.0
    plane_time_s: float = 0.0
    """Seconds of it in which at least one call of the plane was under way in a process that
    produced; of the busiest of them. Waits for admission do not count."""
    cancelled_groups: tuple[str, ...] = ()
    """Uids of groups that were given up because they did not stop in time."""
    superseded_groups: int = 0
    """Groups that somebody else had taken over."""
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Trajectories that failed, by kind."""
    task_batch_sizes: Mapping[str, int] | None = None
    task_results: Mapping[str, ProduceResult] | None = None
    """Of several tasks: the same of each, without times, in the order of their names."""

    @property
    def raw_rewards_mean(self) -> float | None:
        """Mean score before filtering; None if nothing was scored."""
        return self.raw_rewards_sum / self.raw_rewards_count if self.raw_rewards_count else None

    def metrics(self) -> dict[str, float]:
        """What is logged of it, by name; what has no value is left out."""
        named: dict[str, float | None] = {
            "timing/task_n": self.group_gen_count,
            "timing/task_mean_s": self.group_gen_mean_s,
            "timing/task_p50_s": self.group_gen_p50_s,
            "timing/task_p99_s": self.group_gen_p99_s,
            "timing/task_p99_p50_ratio": self.group_gen_p99_p50_ratio,
            "timing/pause_s": self.group_gen_pause_time_s,
            "timing/produce_s": self.produce_time_s,
            "timing/produce_plane_s": self.plane_time_s,
            "async/init_samples": self.leftover_init,
            "async/completed_samples": self.leftover_completed,
            "async/aborted_samples": self.leftover_aborted,
            "async/expired_samples": self.leftover_expired,
            "async/failed_samples": self.failed_samples,
            "async/filtered_samples": self.filtered_samples,
            "async/cancelled_groups": len(self.cancelled_groups),
            "async/superseded_groups": self.superseded_groups,
            "rollout/raw_rewards/mean": self.raw_rewards_mean,
            "rollout/produced_samples": self.produced_samples,
            "rollout/produced_tokens": self.produced_tokens,
        } | {f"rollout/failures/{kind}": count for kind, count in self.failures.items()}
        return {
            name: value
            for name, value in named.items()
            if value is not None and math.isfinite(value)
        }

    def summary(self) -> str:
        """One line for people."""
        parts = [
            f"{len(self.groups)} groups",
            f"{self.produced_samples} trajectories and {self.produced_tokens} tokens "
            f"in {self.produce_time_s:.1f} s",
        ]
        if self.raw_rewards_mean is not None:
            parts.append(f"mean reward {self.raw_rewards_mean:.3f}")
        if self.group_gen_p50_s is not None:
            parts.append(
                f"group p50 {self.group_gen_p50_s:.2f} s, p99 {self.group_gen_p99_s:.2f} s"
            )
        if self.failed_samples:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.failures.items()))
            parts.append(f"{self.failed_samples} failed" + (f" ({kinds})" if kinds else ""))
        counts = {
            "filtered": self.filtered_samples,
            "groups interrupted": self.leftover_aborted + self.leftover_expired,
            "groups given up": len(self.cancelled_groups),
        }
        return "; ".join(parts + [f"{count} {name}" for name, count in counts.items() if count])


@dataclass(slots=True)
class _Counts:
    """The counters of one task."""

    failed_samples: int = 0
    filtered_samples: int = 0
    raw_rewards: list[float] = field(default_factory=list[float])
    produced_samples: int = 0
    produced_tokens: int = 0
    cancelled_groups: list[str] = field(default_factory=list[str])
    superseded_groups: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])

    def record(self, outcome: GroupOutcome) -> None:
        if outcome.status is Status.ARCHIVED:
            self.superseded_groups += 1
            return
        size = len(outcome.members)
        self.produced_samples += size
        self.produced_tokens += sum(member.new_tokens for member in outcome.members)
        if outcome.status in (Status.COMPLETED, Status.FILTERED):
            scores = (member.score for member in outcome.members)
            self.raw_rewards += [float(score) for score in scores if score is not None]
        if outcome.status is Status.FILTERED:
            self.filtered_samples += size
        if outcome.status is Status.FAILED:
            self.failed_samples += size
            self.failures.update(
                member.failure or UNKNOWN_FAILURE
                for member in outcome.members
                if member.status is Status.FAILED
            )


class Window:
    """Counts what groups come to, from one result to the next."""

    def __init__(self, tasks: Iterable[str] = ()) -> None:
        """`tasks`: those that every result has, whether or not anything of them came."""
        self._tasks = tuple(tasks)
        self._of_task: dict[str, _Counts] = {task: _Counts() for task in self._tasks}

    def record(self, outcome: GroupOutcome) -> None:
        """A group has an outcome. A group that was interrupted has one each time.

        Raises:
            ValueError: it has not run.
        """
        if outcome.status is Status.INIT:
            raise ValueError(f"group {outcome.uid!r} has not run: it has no outcome to count")
        self._counts(outcome.task).record(outcome)

    def cancel(self, uid: str, task: str) -> None:
        """A group was given up with everything that it had."""
        self._counts(task).cancelled_groups.append(uid)

    def close(
        self,
        *,
        taken: Iterable[GroupOutcome] = (),
        leftover: Iterable[tuple[str, Status]] = (),
        pause_s: float = 0.0,
        produce_time_s: float = 0.0,
        batch_sizes: Mapping[str, int] | None = None,
        expired_batch: bool = False,
    ) -> ProduceResult:
        """The result of this window; the next begins with everything at zero.

        Args:
            taken: groups that are trained now.
            leftover: task and status of each group that is left.
            batch_sizes: how many groups of each task were asked for; those taken, if not given.

        Raises:
            ValueError: a group that is left has a status that is not one of a leftover; nothing
                was counted anew.
        """
        taken, leftover = list(taken), list(leftover)
        names = {*self._of_task, *(group.task for group in taken), *(task for task, _ in leftover)}
        status = "expired_batch" if expired_batch else "normal"
        of_task = {
            task: _result(
                [self._of_task.get(task, _Counts())],
                [group for group in taken if group.task == task],
                [status for name, status in leftover if name == task],
                status,
            )
            for task in sorted(names)
        }
        times = [
            group.group_generate_time_s
            for group in taken
            if group.group_generate_time_s is not None
        ]
        several = len(names) > 1
        sizes = Counter(group.task for group in taken)
        result = _result(
            list(self._of_task.values()),
            taken,
            [status for _, status in leftover],
            status,
            times=GroupTimes.of(times),
            group_gen_pause_time_s=pause_s if times or pause_s > 0 else None,
            produce_time_s=produce_time_s,
            task_batch_sizes=dict(batch_sizes or {task: sizes[task] for task in of_task})
            if several
            else None,
            task_results=of_task if several else None,
        )
        self._of_task = {task: _Counts() for task in self._tasks}
        return result

    def _counts(self, task: str) -> _Counts:
        return self._of_task.setdefault(task, _Counts())


def _result(
    counts: Sequence[_Counts],
    taken: Sequence[GroupOutcome],
    leftover: Sequence[Status],
    status: Literal["normal", "expired_batch"],
    *,
    times: GroupTimes | None = None,
    **more: Any,
) -> ProduceResult:
    left = Counter(leftover)
    groups_left = {
        f"leftover_{of}": left.pop(of, 0)
        for of in (Status.INIT, Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
    }
    sizeless = sorted(left)
    if sizeless:
        raise ValueError(f"groups that are {', '.join(sizeless)} are not left: they were discarded")
    times = times or GroupTimes()
    failures: Counter[str] = Counter()
    for count in counts:
        failures.update(count.failures)
    rewards = [score for count in counts for score in count.raw_rewards]
    return ProduceResult(
        groups=tuple(group.uid for group in taken),
        status=status,
        group_gen_count=times.count,
        group_gen_mean_s=times.mean_s,
        group_gen_p50_s=times.p50_s,
        group_gen_p99_s=times.p99_s,
        group_gen_p99_p50_ratio=times.p99_p50_ratio,
        failed_samples=sum(count.failed_samples for count in counts),
        filtered_samples=sum(count.filtered_samples for count in counts),
        raw_rewards_sum=math.fsum(rewards),
        raw_rewards_count=len(rewards),
        produced_samples=sum(count.produced_samples for count in counts),
        produced_tokens=sum(count.produced_tokens for count in counts),
        cancelled_groups=tuple(uid for count in counts for uid in count.cancelled_groups),
        superseded_groups=sum(count.superseded_groups for count in counts),
        failures=dict(failures),
        **groups_left,
        **more,
    )
