"""From an agent's requests to the rows of a plane: tokens, log-probs, labels, as made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.capture.ending import Ended, Identity, Rejected
from agentloop.capture.publisher import PlanePublisher, Publication
from agentloop.groups.invariants import what_is_wrong, wrong_rows
from agentloop.trajectory.rows import state_of_row
from agentloop.trajectory.state import RolloutState, Status
from dataplane import AlreadyWritten, AsyncClient, PermissionDenied, StaleWrite, async_connect
from dataplane.fields import IGNORED
from tests.agentloop.capture.captured import OfRun, assistant, capturing, prompt_ids, user
from tests.contract.planes import Plane
from tests.dataplane.outside.gateways import Authority, gateway, token_for

FIELDS = ["input_ids", "labels", "logprobs", "messages", "reward", "extra", "response_model_steps"]
HI = [user("hi")]


def _publisher(client: AsyncClient, partition: str) -> PlanePublisher:
    return PlanePublisher(client, partition)


async def _tags(client: AsyncClient, partition: str) -> dict[str, dict[str, Any]]:
    """Of the trajectories, which are in order; those of no group want an attempt alone."""
    listing = await client.kv_list(partition)
    found: dict[str, dict[str, Any]] = {}
    for key, tags, names in zip(listing.keys, listing.tags, listing.fields, strict=True):
        fields: dict[str, Any] = {}
        if names:
            rows = await client.kv_batch_get([key], partition, names, layout="list")
            fields = {name: column[0] for name, column in rows.fields.items()}
        if not tags.get("is_prompt"):
            found[key] = dict(tags)
            whole = {"attempt": 1, "global_steps": 0, **tags}
            prompts = {tags["uid"]: {"attempt": whole["attempt"], "n": 9}}
            assert what_is_wrong(key, whole, fields, prompts) is None
    return found


@pytest.mark.parametrize("software", ["vllm", "sglang"])
async def test_a_run_is_exact_from_the_server_to_the_plane(
    client: AsyncClient, partition: str, software: str
) -> None:
    made: list[dict[str, Any]] = []
    async with capturing(software, _publisher(client, partition), partition_id=partition) as setup:
        setup.upstream.version = "4"
        setup.upstream.edit = made.append
        await setup.agent.ask("POST", "/v1/steps", {"global_steps": 6})
        run = await setup.agent.start(
            uid="u", session_id=1, task_name="sums", data_source="gsm", tags={"level": 3}
        )
        first = await run.say(HI)
        dialogue = [*HI, assistant(first["content"]), {"role": "tool", "content": "ok"}]
        second = await run.say(dialogue)
        status, told = await run.end({"score": 0.5, "why": "x"}, extra={"seconds": 2})
        assert status == 200
    (key,) = [row["key"] for row in told["trajectories"]]
    assert key == "u_1_0"
    tags = (await _tags(client, partition))[key]
    rows = await client.kv_batch_get([key], partition, FIELDS, layout="list")
    row = {name: column[0] for name, column in rows.fields.items()}

    name = "token_ids" if software == "vllm" else "response_token_ids"
    a, b = (reply["choices"][0] for reply in made)
    before, after = prompt_ids(*HI), prompt_ids(*dialogue)
    gap = len(after) - len(before) - len(a[name])
    said = [[e["logprob"] for e in choice["logprobs"]["content"]] for choice in (a, b)]
    policy_len = len(a[name]) + len(b[name])
    zeros = [0.0] * len(before), [0.0] * gap
    assert row["input_ids"].tolist() == after + b[name]
    assert row["labels"].tolist() == ([IGNORED] * len(before) + a[name] + [IGNORED] * gap + b[name])
    expected = np.array([*zeros[0], *said[0], *zeros[1], *said[1]], np.float32)
    assert torch.equal(row["logprobs"], torch.from_numpy(expected))
    assert row["response_model_steps"].tolist() == [4] * (policy_len + gap)
    assert row["messages"] == [*dialogue, assistant(second["content"])]
    assert row["reward"] == {"score": 0.5, "why": "x"}
    assert row["extra"]["seconds"] == 2
    assert [turn["number"] for turn in row["extra"]["capture"]["turns"]] == [0, 1]

    assert tags["status"] == "completed"
    assert (tags["uid"], tags["session_id"], tags["index"]) == ("u", 1, 0)
    assert (tags["prompt_len"], tags["seq_len"]) == (len(before), len(after) + len(b[name]))
    assert (tags["policy_len"], tags["num_turns"], tags["score"]) == (policy_len, 2, 0.5)
    assert (tags["global_steps"], tags["policy_spans"]) == (6, [[4, policy_len]])
    assert (tags["min_global_steps"], tags["max_global_steps"]) == (4, 4)
    assert (tags["ids_source"], tags["logprob_kind"]) == ("engine", "raw")
    assert (tags["task_name"], tags["data_source"], tags["level"]) == ("sums", "gsm", 3)
    assert (tags["capture_run"], tags["finish_reason"]) == (run.run_id, b["finish_reason"])
    again = state_of_row(RolloutState(HI), tags, row)
    assert again.canonical is not None
    assert again.canonical.input_ids == after + b[name]


async def test_runs_of_a_group_are_whole_when_it_is_ended(
    client: AsyncClient, partition: str
) -> None:
    async with capturing(publisher=_publisher(client, partition)) as setup:
        await setup.agent.ask("POST", "/v1/steps", {"global_steps": 3})
        status, group = await setup.agent.ask("POST", "/v1/groups", {"uid": "u", "n": 2})
        assert (status, group["uid"]) == (201, "u")
        for number in range(2):
            run = await setup.agent.start(uid="u", session_id=number, attempt=group["attempt"])
            await run.say(HI)
            assert (await run.end())[0] == 200
        status, told = await setup.agent.ask(
            "POST", "/v1/groups/end", {"attempt": group["attempt"]}
        )
        assert (status, told["status"]) == (200, "finished")
        assert await wrong_rows(client, await client.kv_list(partition)) == []
        whole = await client.kv_wait(
            partition, {"status": "completed"}, count=1, group_by="uid", timeout=5
        )
        assert sorted(whole.keys) == ["u_0_0", "u_1_0"]
        status, told = await setup.agent.ask(
            "POST", "/v1/groups/end", {"attempt": group["attempt"]}
        )
        assert (status, told["error"]["code"]) == (409, "attempt_closed")


@pytest.mark.parametrize("end", [{"reward": None, "finish_reason": "error"}, None])
async def test_a_group_that_lacks_a_run_ends_as_a_failure(
    client: AsyncClient, partition: str, end: dict[str, Any] | None
) -> None:
    async with capturing(publisher=_publisher(client, partition)) as setup:
        _, group = await setup.agent.ask("POST", "/v1/groups", {"n": 2})
        attempt = group["attempt"]
        for number in range(2):
            run = await setup.agent.start(uid=group["uid"], session_id=number, attempt=attempt)
            await run.say(HI)
            if number == 0 or end is not None:
                assert (await run.end(**(end if number and end else {})))[0] == 200
        status, told = await setup.agent.ask("POST", "/v1/groups/end", {"attempt": attempt})
        assert (status, told["status"]) == (200, "failure")


async def test_a_capture_behind_a_gateway_writes_what_its_token_lets_it(
    plane: Plane, client: AsyncClient, partition: str, tmp_path: Path
) -> None:
    """As outside a cluster: TLS, a token for one partition, and none for the quarantine."""
    authority = Authority(tmp_path)
    token = token_for(tmp_path, "capture", {partition: ["group", "put", "put_tags", "list"]})
    served = {**authority.settings, "token_file": tmp_path / "tokens.json"}
    with gateway(plane.name, plane.settings, listen=("127.0.0.1:0",), **served) as behind:
        access = {"token_file": token, "ca_file": authority.ca_file}
        async with (
            await async_connect(address=behind.addresses[0], config=access) as outside,
            capturing(publisher=_publisher(outside, partition)) as setup,
        ):
            _, group = await setup.agent.ask("POST", "/v1/groups", {"uid": "u", "n": 1})
            run = await setup.agent.start(uid="u", attempt=group["attempt"])
            await run.say(HI)
            setup.upstream.edit = lambda reply: reply.pop("prompt_token_ids")
            await run.say([user("bad")])
            assert (await run.end())[0] == 200
            other = await setup.agent.start(uid="alone")
            await other.say(HI)
            assert (await other.end())[0] == 200  # of failed rows alone
            status, told = await setup.agent.ask(
                "POST", "/v1/groups/end", {"attempt": group["attempt"]}
            )
            assert (status, told["status"]) == (200, "finished")
    tags = await _tags(client, partition)
    assert {key: row["status"] for key, row in tags.items()} == {
        "u_0_0": "completed", "alone_0_0": "failed",
    }  # fmt: skip
    rows = await client.kv_batch_get(["u_0_0"], partition, FIELDS[:3], layout="list")
    assert rows.fields["input_ids"][0].tolist()[:20] == prompt_ids(*HI)
    assert f"quarantine.{partition}" not in (await client.status())["partitions"]


async def test_a_run_whose_group_began_anew_is_too_late(
    client: AsyncClient, partition: str
) -> None:
    attempt = await client.begin_group("u", partition, n=1)
    async with capturing(publisher=_publisher(client, partition)) as setup:
        run = await setup.agent.start(uid="u", attempt=attempt)
        await run.say(HI)
        await client.begin_group("u", partition, n=1)
        for _ in range(2):
            status, told = await run.end()
            assert (status, told["error"]["code"]) == (409, "attempt_closed")
        assert await _tags(client, partition) == {}
        assert setup.capture.runs.counts.stale_runs == 1


async def test_branches_are_trajectories_of_one_session_and_one_revision(
    client: AsyncClient, partition: str
) -> None:
    async with capturing(publisher=_publisher(client, partition)) as setup:
        run = await setup.agent.start(uid="u")
        first = await run.say(HI)
        begun = [*HI, assistant(first["content"])]
        await run.say([*begun, user("a")])
        await run.say([*begun, user("b")])
        await run.say([user("else")])
        before = (await client.status())["partitions"].get(partition)
        assert before is None
        assert (await run.end())[0] == 200
    listing = await client.kv_list(partition)
    tags = await _tags(client, partition)
    assert sorted(tags) == ["u_0_0", "u_0_1", "u_0_2"]
    assert [tags[key]["policy_len"] for key in sorted(tags)] == [12, 6, 6]
    assert {row["score"] for row in tags.values()} == {1.0}
    assert listing.revision.n == 1 or len({row["capture_run"] for row in tags.values()}) == 1


async def test_an_end_whose_answer_was_lost_has_one_effect(
    client: AsyncClient, partition: str, tmp_path: Path
) -> None:
    publisher = _publisher(client, partition)
    async with capturing(publisher=publisher, journal=tmp_path) as setup:
        run = await setup.agent.start(uid="u")
        await run.say(HI)
        as_it_was = (tmp_path / f"{run.run_id}.jsonl").read_bytes()
        _, told = await run.end()
        upstream = setup.upstream.url
    (tmp_path / f"{run.run_id}.ended").unlink()
    (tmp_path / f"{run.run_id}.jsonl").write_bytes(as_it_was)
    revision = (await client.kv_list(partition)).revision
    asked = {"url": upstream}
    async with capturing(publisher=publisher, journal=tmp_path, upstream=asked) as setup:
        run.agent = setup.agent
        assert await run.end() == (200, told)
    assert (await client.kv_list(partition)).revision == revision


async def test_rows_of_somebody_else_are_not_overwritten(
    client: AsyncClient, partition: str
) -> None:
    await client.kv_put("u_0_0", partition, tags={"status": "mine"})
    async with capturing(publisher=_publisher(client, partition)) as setup:
        run = await setup.agent.start(uid="u")
        await run.say(HI)
        status, told = await run.end()
        assert (status, told["error"]["code"]) == (409, "already_written")
    listing = await client.kv_list(partition)
    assert [dict(tags) for tags in listing.tags] == [{"status": "mine"}]


async def test_what_is_refused_is_a_failed_row_and_in_quarantine(
    client: AsyncClient, partition: str
) -> None:
    def edit(reply: dict[str, Any]) -> None:
        reply["choices"][0]["logprobs"]["content"][2]["logprob"] = -9999.0

    async with capturing(publisher=_publisher(client, partition)) as setup:
        setup.upstream.edit = edit
        run = await setup.agent.start(uid="u")
        await run.say(HI)
        status, told = await run.end()
        assert status == 200
    (row,) = (await _tags(client, partition)).values()
    assert row["status"] == "failed"
    assert "minus infinity" in row["error_msg"]
    assert "score" not in row
    aside = f"quarantine.{partition}"
    listing = await client.kv_list(aside)
    (tags,) = listing.tags
    assert tags["reason"] == row["error_msg"] == told["rejected"][0]["reason"]
    assert (tags["uid"], tags["capture_run"]) == ("u", run.run_id)
    kept = await client.kv_batch_get(listing.keys, aside, ["trajectory"], layout="list")
    evidence = json.loads(kept.fields["trajectory"][0]["evidence"])
    assert '"logprob": -9999.0' in evidence["reply"]


async def test_a_quarantine_that_cannot_be_written_costs_no_trajectory(
    client: AsyncClient, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Gateway:
        """A client that may write to one partition."""

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        async def kv_put(self, key: str, partition_id: str, *rest: Any, **more: Any) -> Any:
            if partition_id != partition:
                raise PermissionDenied("not there")
            return await client.kv_put(key, partition_id, *rest, **more)

    publisher = PlanePublisher(Gateway(), partition)  # type: ignore[arg-type]
    async with capturing(publisher=publisher) as setup:
        run = await setup.agent.start(uid="u")
        await run.say(HI)
        setup.upstream.edit = lambda reply: reply.pop("prompt_token_ids")
        await run.say(HI)
        assert (await run.end())[0] == 200
    assert list(await _tags(client, partition)) == ["u_0_0"]
    assert "not in quarantine" in caplog.text


async def test_a_quarantine_takes_only_so_much(client: AsyncClient, partition: str) -> None:
    state = RolloutState([], uid="u", status=Status.FAILED, error_msg="x")
    rejected = [Rejected(f"turn-{number}", "wrong", {}) for number in range(5)]
    publisher = PlanePublisher(client, partition, max_quarantined=3)
    await publisher.publish(Publication(Identity("r", "u", 0), Ended([state], rejected)))
    assert len((await client.kv_list(f"quarantine.{partition}")).keys) == 3


async def test_a_publication_that_is_repeated_puts_what_is_left(
    client: AsyncClient, partition: str
) -> None:
    """The put of one kind of rows worked, and that of another did not."""
    states = [
        RolloutState([], "u", 0, index, "t", status=Status.FAILED, error_msg="x")
        for index in range(2)
    ]
    publisher, identity = PlanePublisher(client, partition), Identity("r", "u", 0)
    await publisher.publish(Publication(identity, Ended(states[:1], [])))
    await publisher.publish(Publication(identity, Ended(states, [])))
    assert sorted(await _tags(client, partition)) == ["u_0_0", "u_0_1"]
    with pytest.raises(AlreadyWritten):
        await publisher.publish(Publication(Identity("other", "u", 0), Ended(states, [])))


async def test_under_a_closed_attempt_nothing_is_put(client: AsyncClient, partition: str) -> None:
    attempt = await client.begin_group("u", partition, n=1)
    await client.end_group(attempt, "failure")
    state = RolloutState([], uid="u", status=Status.FAILED, error_msg="x")
    publication = Publication(Identity("r", "u", 0, attempt), Ended([state], []))
    with pytest.raises(StaleWrite):
        await PlanePublisher(client, partition).publish(publication)


async def test_aborted_runs_keep_what_they_have(client: AsyncClient, partition: str) -> None:
    async with capturing(publisher=_publisher(client, partition)) as setup:
        run: OfRun = await setup.agent.start(uid="u")
        await run.say(HI)
        assert (await run.end(None, finish_reason="abort"))[0] == 200
    (row,) = (await _tags(client, partition)).values()
    assert (row["status"], row["policy_len"]) == ("aborted", 6)
    assert "score" not in row
