"""The producers of a run as a trainer drives them, on a real plane with the quickstart's model."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import dataplane
from agentloop.datasets import PromptRow, Sampler
from agentloop.engines.types import Sampling
from agentloop.groups.invariants import wrong_rows
from agentloop.groups.job import GroupJob
from agentloop.groups.plane_clock import PlaneClock, busiest
from agentloop.groups.task import Task
from agentloop.production.accounting import ProduceResult
from agentloop.quickstart.demonstrator import SumDemonstrator
from agentloop.quickstart.model import make_model
from agentloop.quickstart.tokenizer import QUESTION
from agentloop.rollouts import AgentRollouts, open_rollouts
from agentloop.rollouts.supply import PromptSupply
from agentloop.trajectory.state import RolloutState
from dataplane import AsyncClient, publish_weights
from tests.contract.planes import Plane

if TYPE_CHECKING:
    from trainer.rollouts import OpenRollouts, Rollouts

    _opener: OpenRollouts = open_rollouts
    _made = cast("Callable[[], AgentRollouts]", None)
    _rollouts: Rollouts = _made()

TRAIN, HELD_OUT = 10, 5


async def said_something(state: RolloutState) -> float:
    """A reward that costs nothing."""
    return float(bool(state.response_ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the files of two datasets."""
    root = tmp_path_factory.mktemp("quickstart")
    make_model(root / "model", seed=0)
    for name, first, count in (("train", 10, TRAIN), ("held_out", 50, HELD_OUT)):
        rows = [{"prompt": f"{QUESTION}{first + i} + {i} ="} for i in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def task(folder: Path, name: str, file: str, n: int) -> dict[str, Any]:
    return {
        "name": name,
        "n": n,
        "dataset": {"kind": "files", "paths": str(folder / f"{file}.jsonl")},
        "loop": {
            "path": "agentloop.loops.tool_agent:ToolAgentLoop",
            "options": {
                "tools": ["agentloop.tools.calculator:Calculator"],
                "max_turns": 2,
                "call_form": "hermes",
            },
        },
        "reward": {"kind": "function", "function": f"{__name__}:said_something"},
        "sampling": {"max_tokens": 24},
    }


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    demonstrator = f"{SumDemonstrator.__module__}:SumDemonstrator"
    return {
        "engine": {"kind": "hf", "process": False, "max_batch": 64, "threads": 1},
        "workers": {"kind": "local", "groups": 8},
        "tasks": [task(folder, "sums", "train", 3)],
        "eval_tasks": [task(folder, "held-out", "held_out", 2)],
        "demonstrations": {
            "calls": {"demonstrator": {"path": demonstrator}},
            "direct": {"demonstrator": {"path": demonstrator, "options": {"direct_share": 1.0}}},
        },
        **more,
    }


@asynccontextmanager
async def opened(
    plane: Plane, folder: Path, partition: str, *, run_id: str = "", seed: int = 7, **more: Any
) -> AsyncGenerator[AgentRollouts]:
    rollouts = await open_rollouts(
        settings(folder, **more),
        plane={"name": plane.name, "settings": plane.settings},
        partitions={
            "train": partition,
            "evaluate": f"{partition}-val",
            "demonstrate": f"{partition}-demos",
        },
        model_path=str(folder / "model"),
        seed=seed,
        run_id=run_id or partition,
        ray_address=None,
    )
    try:
        yield rollouts
    finally:
        await rollouts.close()
        await rollouts.close()  # repeatable


class Seen:
    """What lies in a partition."""

    def __init__(self, prompts: dict[str, Any], rows: dict[str, Any]) -> None:
        self.prompts = prompts
        self.rows = rows
        """Trajectories: their tags and fields, by key."""

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {key: row["input_ids"] for key, row in self.rows.items()}

    @property
    def asked(self) -> dict[str, str]:
        """The question of each prompt, by uid."""
        return {
            str(row["tags"]["uid"]): row["messages"][0]["content"] for row in self.rows.values()
        }


async def look(client: AsyncClient, partition: str) -> Seen:
    """What is there, after a look at whether it is in order."""
    listing = await client.kv_list(partition)
    assert await wrong_rows(client, listing) == []
    tags = dict(zip(listing.keys, cast("Any", listing.tags), strict=True))
    prompts = {key: its for key, its in tags.items() if its.get("is_prompt")}
    keys = sorted(set(tags) - set(prompts))
    rows: dict[str, Any] = {}
    if keys:
        got = await client.kv_batch_get(
            keys, partition, ["input_ids", "labels", "messages"], layout="list"
        )
        for i, key in enumerate(got.keys):
            rows[key] = {
                "tags": tags[key],
                "input_ids": got.fields["input_ids"][i].tolist(),
                "labels": got.fields["labels"][i].tolist(),
                "messages": got.fields["messages"][i],
            }
    return Seen(prompts, rows)


async def trained(client: AsyncClient, partition: str, uids: list[str] | None = None) -> None:
    """Clear prompts as a trainer does when they are trained; all of them if not named."""
    where: dict[str, Any] = {} if uids is None else {"uid": {"in": uids}}
    await client.kv_clear(None, partition, where=where, retire=True)


# -- a run -----------------------------------------------------------------------------------


async def test_training_evaluation_and_demonstrations_share_workers_and_no_partition(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    async with opened(plane, folder, partition) as rollouts:
        assert (rollouts.dataset_size, rollouts.workers) == (TRAIN, 1)
        made = await rollouts.produce(4, 1)
        assert made.produced_samples == made.raw_rewards_count == 12
        assert made.raw_rewards_sum == 12.0
        assert 0 < made.plane_time_s <= made.produce_time_s
        assert made.metrics()["timing/produce_plane_s"] == made.plane_time_s
        shown = await rollouts.demonstrate("calls", 6, 3)
        assert (shown.produced_samples, shown.raw_rewards_count) == (6, 0)
        told = await rollouts.demonstrate("direct", 8, 3)  # the six that are there are not its own
        assert told.produced_samples == 8
        judged = await rollouts.evaluate(1, prompts=None, greedy=False)
        assert judged.produced_samples == 2 * HELD_OUT
        assert {t["global_steps"] for t in (await look(client, partition)).prompts.values()} == {1}
        assert len((await look(client, partition)).prompts) == 4
        demos = await look(client, f"{partition}-demos")
        assert {row["tags"]["task_name"] for row in demos.rows.values()} == {
            "calls/sums", "direct/sums"
        }  # fmt: skip
        for row in demos.rows.values():
            turns = [m["role"] for m in row["messages"]]
            by_calls = row["tags"]["task_name"] == "calls/sums"
            assert turns == ["user", "assistant", *(["tool", "assistant"] * by_calls)]
            question = row["messages"][0]["content"].removeprefix(QUESTION).removesuffix(" =")
            left, right = map(int, question.split(" + "))
            assert row["messages"][-1]["content"] == f"<answer>{left + right}</answer>"
            assert not row["tags"]["has_rollout_logprobs"]
            assert row["tags"]["min_global_steps"] == 2  # as a rollout of step 3 would be
        with pytest.raises(ValueError, match="no demonstration 'call'; there are: calls, direct"):
            await rollouts.demonstrate("call", 1, 1)


async def test_an_evaluation_asks_the_same_prompts_each_time_and_greedy_says_the_same(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    async with opened(plane, folder, partition) as rollouts:
        seen: list[Seen] = []
        for step, prompts, greedy in (
            (1, None, True),
            (2, None, True),
            (2, 3, False),
            (3, 99, False),
        ):
            await rollouts.evaluate(step, prompts=prompts, greedy=greedy)
            seen.append(await look(client, f"{partition}-val"))  # what was there is gone
    asked = [sorted(each.asked.values()) for each in seen]
    assert asked[0] == asked[1] == asked[3] == [f"{QUESTION}{50 + i} + {i} =" for i in range(5)]
    assert asked[2] == asked[0][:3]
    assert [len(each.rows) for each in seen] == [5, 5, 6, 10]  # one session each if greedy
    assert {row["tags"]["score"] for each in seen for row in each.rows.values()} == {1.0}
    greedy = [sorted(each.tokens.values()) for each in seen[:2]]
    assert greedy[0] == greedy[1]
    sampled = list(seen[2].tokens.values())
    assert len(set(map(tuple, sampled))) > 3


async def test_nothing_to_evaluate_is_said(plane: Plane, folder: Path, partition: str) -> None:
    async with opened(plane, folder, partition, eval_tasks=[]) as rollouts:
        with pytest.raises(ValueError, match="nothing to evaluate"):
            await rollouts.evaluate(1, prompts=None, greedy=True)


async def test_a_worker_process_takes_weights_and_tells_its_time(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    with dataplane.connect(plane.name, config=plane.settings) as publisher:
        publish_weights(publisher, model, 3)
    quiet = [{**task(folder, "sums", "train", 2), "reward": None}]
    async with opened(
        plane, folder, partition, tasks=quiet, workers={"kind": "process", "groups": 4}
    ) as rollouts:
        await rollouts.update_weights(3)
        made = await rollouts.produce(3, 4)
        assert 0 < made.plane_time_s <= made.produce_time_s
        seen = await look(client, partition)
        tags = [row["tags"] for row in seen.rows.values()]
        assert [t["min_global_steps"] for t in tags] == [3] * 6
        elsewhere = seen.tokens
    # The same prompts in this process draw the same tokens: the noise is the session's alone.
    await trained(client, partition)
    async with opened(plane, folder, partition, tasks=quiet) as rollouts:
        await rollouts.produce(3, 4)
        assert (await look(client, partition)).tokens == elsewhere


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tusks": []}, "tusks"),
        ({"tasks": []}, "tasks"),
        ({"demonstrations": {"x": {"demonstrator": {"path": "json:dumps"}}}}, "json:dumps"),
        ({"demonstrations": {"x": {"demonstrator": {"path": "json:nobody"}}}}, "nobody"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(
    plane: Plane, folder: Path, partition: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        async with opened(plane, folder, partition, **change):
            pass


# -- resuming --------------------------------------------------------------------------------


async def test_a_resumed_run_draws_and_says_what_an_uninterrupted_one_does(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    steps: list[Seen] = []
    async with opened(plane, folder, partition) as rollouts:
        state: dict[str, Any] = {}
        for step in range(1, 5):
            await rollouts.produce(4, step)
            steps.append(await look(client, partition))
            await trained(client, partition)
            if step == 2:
                state = json.loads(json.dumps(rollouts.state()))
    assert len({key for seen in steps for key in seen.rows}) == 4 * 12  # no key comes twice
    groups: dict[str, set[tuple[int, ...]]] = {}
    for seen in steps:
        for key, ids in seen.tokens.items():
            groups.setdefault(key.split("_")[0], set()).add(tuple(ids))
    assert sum(map(len, groups.values())) > 40  # hardly any two sessions of a group agree
    # The killed run made step 3 with nobody left to train it, in a plane that is gone.
    async with opened(plane, folder, partition, run_id="another") as rollouts:
        rollouts.restore(state)
        assert await rollouts.recover(3) == 0
        for step, seen in ((3, steps[2]), (4, steps[3])):
            await rollouts.produce(4, step)
            assert (await look(client, partition)).tokens == seen.tokens
            await trained(client, partition)


async def test_nemo_3429_ten_are_drawn_six_are_trained_and_the_other_four_run_once_more(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    async with opened(plane, folder, partition) as rollouts:
        await rollouts.produce(10, 1)
        first = await look(client, partition)
        uids = sorted(first.prompts)
        await trained(client, partition, uids[:6])
        state = json.loads(json.dumps(rollouts.state()))
        # It dies in the middle of the next batch: that was never saved.
        await rollouts.produce(8, 2)
        later = set((await look(client, partition)).prompts) - set(uids)
        assert len(later) == 4
    await trained(client, partition)  # and the plane with it
    async with opened(plane, folder, partition) as rollouts:
        rollouts.restore(state)
        await rollouts.produce(4, 2)
        assert set((await look(client, partition)).prompts) == set(uids[6:])
        await trained(client, partition)
        await rollouts.produce(6, 3)
        third = await look(client, partition)
        assert later < set(third.prompts)  # the next six draws of the same order
        assert not set(third.prompts) & set(uids)


async def test_nemo_3429_where_the_plane_outlives_the_run_its_prompts_are_taken_over(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    async with opened(plane, folder, partition) as rollouts:
        await rollouts.produce(4, 1)
        await trained(client, partition)
        state = json.loads(json.dumps(rollouts.state()))
        await rollouts.produce(5, 2)
        drawn = sorted((await look(client, partition)).prompts)
    # As a worker that died in the middle leaves them: two have no end.
    for uid in drawn[:2]:
        await client.kv_put(uid, partition, tags={"status": "pending"}, must_exist=True)
    for uid in drawn[2:3]:
        await trained(client, partition, [uid])  # trained after the last checkpoint
    async with opened(plane, folder, partition) as rollouts:
        rollouts.restore(state)
        assert await rollouts.recover(2) == 2
        made = await rollouts.produce(4, 2)
        assert made.produced_samples == 2 * 3  # two were finished already
        here = await look(client, partition)
        assert sorted(here.prompts) == sorted([*drawn[:2], *drawn[3:]])
        assert {tags["status"] for tags in here.prompts.values()} == {"finished"}
        saved = json.loads(json.dumps(rollouts.state()))
        await trained(client, partition)
        ended = json.loads(json.dumps(rollouts.state()))
        await rollouts.produce(2, 3)
        after = await look(client, partition)
        assert drawn[2] in after.prompts  # nobody knows that it was trained
        assert not (set(after.prompts) - {drawn[2]}) & set(drawn)
        await trained(client, partition)
    async with opened(plane, folder, partition) as rollouts:
        rollouts.restore(ended)  # the plane is gone: what it had taken over was trained
        await rollouts.produce(2, 3)
        assert set((await look(client, partition)).prompts) == set(after.prompts)
        await trained(client, partition)
        rollouts.restore(saved)  # and here it was not
        await rollouts.produce(5, 3)
        assert set((await look(client, partition)).prompts) == set(drawn)


async def test_the_state_of_other_data_is_refused_and_changes_nothing(
    plane: Plane, client: AsyncClient, folder: Path, partition: str
) -> None:
    async with opened(plane, folder, partition) as rollouts:
        await rollouts.demonstrate("calls", 3, 1)
        await trained(client, f"{partition}-demos")
        state = rollouts.state()
        shown = {name: each["tasks"] for name, each in state["demonstrations"].items()}
        assert shown["calls"]["calls/sums"]["drawn"] == 3
        orders = {
            its["seed"]
            for tasks in (state["train"]["tasks"], *shown.values())
            for its in tasks.values()
        }
        assert len(orders) == 3  # what is shown is not what is trained next
    async with opened(plane, folder, partition, run_id="another") as rollouts:
        fresh = rollouts.state()
        half_wrong = json.loads(json.dumps(state))
        half_wrong["train"]["tasks"]["sums"]["drawn"] = 2
        half_wrong["demonstrations"]["direct"]["tasks"]["direct/sums"]["prompts"] = 99
        with pytest.raises(ValueError, match="prompts 99, this one has 10"):
            rollouts.restore(half_wrong)
        assert rollouts.state() == fresh
        rollouts.restore(state)
        assert rollouts.state() == state  # also its run
    one_more = [task(folder, "sums", "train", 3), task(folder, "more", "train", 3)]
    async with opened(plane, folder, partition, tasks=one_more) as rollouts:
        with pytest.raises(ValueError, match="the saved tasks are sums, those here are more, sums"):
            rollouts.restore(state)
    async with opened(plane, folder, partition, seed=8) as rollouts:
        fresh = rollouts.state()
        with pytest.raises(ValueError, match="task 'sums': the saved sampler had seed 7"):
            rollouts.restore(state)
        assert rollouts.state() == fresh
    async with opened(plane, folder, partition, demonstrations={}) as rollouts:
        for wrong, message in (
            (state, r"demonstrations are \['calls', 'direct'\], those here are \[\]"),
            ({**state, "version": 9}, "version 9"),
            ({"version": 1}, "lacks run_id"),
        ):
            with pytest.raises(ValueError, match=message):
                rollouts.restore(wrong)


def test_it_is_what_a_trainer_asks_for() -> None:
    """The two packages do not import each other: nothing else holds their seam together."""
    from trainer.rollouts import OpenRollouts, Produced, Rollouts

    def arguments(of: Any) -> list[str]:
        return [str(p).split(":")[0] for p in inspect.signature(of).parameters.values()]

    asked = [name for name in vars(Rollouts) if not name.startswith("_")]
    assert len(asked) >= 10
    for name in asked:
        theirs, mine = getattr(Rollouts, name), getattr(AgentRollouts, name)
        if isinstance(theirs, property):
            assert isinstance(mine, property)
            continue
        assert arguments(theirs) == arguments(mine), name
        assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(mine), name
    assert arguments(OpenRollouts.__call__)[1:] == arguments(open_rollouts)
    result = ProduceResult(groups=())
    assert all(hasattr(result, name) for name in vars(Produced) if not name.startswith("_"))


# -- parts of it -----------------------------------------------------------------------------


class Numbers:
    """A dataset of numbered prompts."""

    overlong = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, position: int) -> PromptRow:
        return PromptRow(position, [{"role": "user", "content": str(position)}], {}, None, [1])


def supply(**seeds: int) -> PromptSupply:
    return PromptSupply(
        {name: Sampler(Numbers(), seed=seed, run_id="r", name=name) for name, seed in seeds.items()}
    )


def drawn(of: PromptSupply, count: int, name: str = "a") -> list[str]:
    return [of.next_row(name).uid for _ in range(count)]


def test_prompts_in_the_plane_come_again_once_in_their_order_and_before_new_ones() -> None:
    one = supply(a=1, b=2)
    ten, others = drawn(one, 10), drawn(one, 3, "b")
    there = {ten[7], ten[2], others[0]}
    state = json.loads(json.dumps(one.state(there)))
    again = supply(a=1, b=2)
    again.restore(state)
    assert drawn(again, 4) == [ten[2], ten[7], *drawn(one, 2)]
    assert drawn(again, 1, "b") == others[:1]
    assert json.loads(json.dumps(again.state(())))["tasks"]["a"]["drawn"] == 12
    # Saved before those that come again were drawn: they still do.
    third = supply(a=1, b=2)
    third.restore(state)
    fourth = supply(a=1, b=2)
    fourth.restore(third.state(there))
    assert drawn(fourth, 2) == [ten[2], ten[7]]


def test_prompts_that_run_already_are_passed_over_once() -> None:
    one, other = supply(a=1), supply(a=1)
    five = drawn(one, 5)
    other.found([five[0], five[3], "of another run"])
    assert other.unfinished == 3
    assert drawn(other, 3) == [five[1], five[2], five[4]]
    # One of them is trained by now, one is not.
    third = supply(a=1)
    third.restore(json.loads(json.dumps(other.state({five[3]}))))
    assert drawn(third, 2) == [five[3], *drawn(one, 1)]


def test_a_restore_that_fails_half_way_leaves_the_tasks_as_they_were() -> None:
    one, other = supply(a=1, b=2), supply(a=1, b=3)
    drawn(one, 5)
    first = drawn(supply(a=1, b=3), 2)
    with pytest.raises(ValueError, match="task 'b'"):
        other.restore(one.state(()))
    assert drawn(other, 2) == first
    with pytest.raises(ValueError, match="no state of prompts"):
        other.restore({"tasks": 3})


def test_noise_is_keyed_by_seed_step_uid_and_session() -> None:
    """A session's seed plus its number would give two sessions of neighbouring seeds one noise."""

    def seed(task_seed: int = 7, step: int = 1, uid: str = "u", session: int = 0) -> int:
        made = GroupJob(uid, "p", "t", 8, step, [])
        its = _task(Sampling(seed=task_seed)).sampling_of(made, session).seed
        assert its is not None
        return its

    seeds = {
        seed(task_seed, step, uid, session)
        for task_seed in (7, 8)
        for step in (1, 2, 11)
        for uid in ("u", "u1")
        for session in (0, 1, 11)
    }
    assert len(seeds) == 2 * 3 * 2 * 3
    assert all(0 <= each < 2**31 for each in seeds)
    assert seed() == seed() == 1_346_572_912  # of any process and release: runs are resumed
    job = GroupJob("u", "p", "t", 8, 1, [])
    assert _task(Sampling()).sampling_of(job, 3).seed is None


def test_a_greedy_job_takes_the_likeliest_token_also_after_it_was_stored() -> None:
    job = GroupJob("u", "p", "t", 1, 1, [], greedy=True)
    again = GroupJob.of_prompt("p", job.prompt_tags(), job.prompt_fields(), 2)
    for each in (job, GroupJob.of(job.plain()), again):
        assert _task(Sampling(temperature=0.7)).sampling_of(each, 0).temperature == 0.0
    plain = GroupJob("u", "p", "t", 1, 1, [])
    assert _task(Sampling(temperature=0.7)).sampling_of(plain, 0).temperature == 0.7


def _task(sampling: Sampling) -> Task:
    nothing = cast("Any", None)
    return Task("t", nothing, nothing, nothing, sampling=sampling)


def test_calls_of_the_plane_that_overlap_count_once() -> None:
    """From 1 to 4 and from 6 to 7; the last is under way still."""
    now = [0.0]
    clock = PlaneClock(lambda: now[0])

    def at(time: float) -> None:
        now[0] = time

    first, second, third = clock.call(), clock.call(), clock.call()
    at(1.0)
    first.__enter__()
    at(2.0)
    second.__enter__()
    at(3.0)
    first.__exit__(None, None, None)
    at(4.0)
    second.__exit__(None, None, None)
    at(6.0)
    assert clock.seconds == 3.0
    third.__enter__()
    at(7.0)
    assert clock.seconds == 4.0
    with pytest.raises(RuntimeError), clock.call():
        at(8.0)
        raise RuntimeError
    third.__exit__(None, None, None)
    assert clock.seconds == 5.0
    assert busiest({"a": 1.0, "gone": 9.0}, {"a": 1.5, "new": 0.7}) == 0.7
