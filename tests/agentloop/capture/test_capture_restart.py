"""A capture that dies and one that goes on: what is on disk, whole or not."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from agentloop.capture.journal import Journal, JournalInUse
from agentloop.capture.settings import RunLimits
from dataplane import Unreachable
from tests.agentloop.capture.captured import Shelf, assistant, capturing, user
from tests.agentloop.rollout_server import RolloutServer

HI = [user("hi")]


def lines(folder: Path, run_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{run_id}.jsonl").read_text().splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_another_process_goes_on_with_a_run(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run = await setup.agent.start(uid="u", session_id=4, tags={"level": 2})
            first = await run.say(HI)
            _, keyed = await run.chat([user("aside")], h_Idempotency_Key="k")
            path = f"/v1/runs/{run.run_id}/reward"
            await setup.agent.ask("POST", path, {"reward": {"score": 0.5}, "extra": {"a": 1}})
            before = await run.shown()
        async with capturing(server=server, journal=tmp_path) as setup:
            assert setup.capture.runs.counts.restored == 1
            run.agent = setup.agent
            assert await run.shown() == before
            dialogue = [*HI, assistant(first["content"]), user("more")]
            await run.say(dialogue)
            _, again = await run.chat([user("aside")], h_Idempotency_Key="k")
            assert again == keyed
            assert [b["turns"] for b in (await run.shown())["branches"]] == [[0, 2], [1]]
            status, told = await run.end(None)
            assert (status, told["reward"]) == (200, {"score": 0.5})
            one, _ = setup.publisher.states
            assert (one.uid, one.session_id, one.extra["a"]) == ("u", 4, 1)
            assert one.conversation is not None
            assert one.conversation[:-1] == dialogue
            assert setup.publisher.publications[0].identity.tags == {"level": 2}
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert await run.end(None) == (200, told)  # an end that is repeated is answered so
            assert setup.publisher.publications == []
            assert len(setup.capture.runs) == 0


async def test_the_journal_holds_no_key_and_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    async with capturing(journal=folder) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        raw = (folder / f"{run.run_id}.jsonl").read_bytes()
        assert run.key.encode() not in raw
        assert run.key.split("_", 2)[2].encode() not in raw
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
        assert modes.pop(folder) == 0o700
        assert set(modes.values()) == {0o600}


async def test_a_line_that_was_cut_short_is_cut_off(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run = await setup.agent.start()
            await run.say(HI)
            await run.say([user("ho")])
        path = tmp_path / f"{run.run_id}.jsonl"
        raw = path.read_bytes()
        path.write_bytes(raw[:-7])
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert [turn["number"] for turn in (await run.shown())["turns"]] == [0]
            await run.say([user("ho")])
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent  # what was written after it is whole
            assert (await run.end())[0] == 200
            assert len(setup.publisher.states) == 2


@pytest.mark.parametrize("damage", ["garbage", "a turn", "a kind", "a version", "nothing"])
async def test_a_damaged_run_is_put_aside_and_the_others_go_on(tmp_path: Path, damage: str) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run, other = await setup.agent.start(), await setup.agent.start()
            await run.say(HI)
            await other.say(HI)
        path = tmp_path / f"{run.run_id}.jsonl"
        head, turn = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(
            {
                "garbage": head + b"\x80\x04\x95\n" + turn,
                "a turn": head + turn.replace(b'"begin":', b'"began":'),
                "a kind": head + b'{"colour":1}\n' + turn,
                "a version": head.replace(b'"uid":', b'"udi":') + turn,
                "nothing": b"",
            }[damage]
        )
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = other.agent = setup.agent
            status, _ = await setup.agent.ask("GET", f"/v1/runs/{run.run_id}")
            assert status == 404
            assert (tmp_path / f"{run.run_id}.jsonl.damaged").exists()
            assert (await other.end())[0] == 200


async def test_a_journal_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run = await setup.agent.start()
            await run.say(HI)
        limits = RunLimits(max_run_bytes=100)
        async with capturing(server=server, journal=tmp_path, limits=limits) as setup:
            assert len(setup.capture.runs) == 0
            assert (tmp_path / f"{run.run_id}.jsonl.damaged").exists()


async def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalInUse, match="its own folder"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of what is written still fits."""
    write, tries = os.write, itertools.count()

    def full(file: int, raw: bytes) -> int:
        if next(tries) % 2:
            raise OSError(28, "No space left on device")
        return write(file, raw[: len(raw) // 2])

    monkeypatch.setattr("agentloop.capture.journal.os.write", full)


async def test_a_disk_that_is_full_records_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with capturing(journal=tmp_path) as setup:
        run = await setup.agent.start()
        with monkeypatch.context() as patch:
            _fill_disk(patch)
            status, told = await run.chat(HI)
            assert (status, told["error"]["code"]) == (507, "journal_failed")
            status, told = await setup.agent.ask("POST", "/v1/runs", {})
            assert (status, told["error"]["code"]) == (507, "journal_failed")
            assert len(setup.capture.runs) == 1
        assert (await run.shown())["turns"] == []
        await run.say(HI)
        assert len(lines(tmp_path, run.run_id)) == 2


async def test_a_turn_that_was_undone_stays_undone(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run = await setup.agent.start()
            await run.say(HI)
            await run.say([user("ho")])
            kept = setup.capture.runs.find(run.run_id)
            assert kept is not None
            setup.capture.runs.undo(kept, 1)
            setup.capture.runs.undo(kept, 1)
            assert setup.capture.runs.counts.undone_turns == 1
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert [turn["number"] for turn in (await run.shown())["turns"]] == [0]


async def test_a_run_that_was_being_published_takes_no_turns_and_is_published_again(
    tmp_path: Path,
) -> None:
    """Its process died after the plane had the rows, and before it was written down."""
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path) as setup:
            run = await setup.agent.start()
            await run.say(HI)
            as_it_was = (tmp_path / f"{run.run_id}.jsonl").read_bytes()
            _, told = await run.end()
            ended = tmp_path / f"{run.run_id}.ended"
            assert ended.exists()
            assert not (tmp_path / f"{run.run_id}.jsonl").exists()
            ended.unlink()
        verdict = {"verdict": {"reward": {"score": 1.0}}}
        rest = [json.dumps(line) + "\n" for line in (verdict, {"closed": True})]
        (tmp_path / f"{run.run_id}.jsonl").write_bytes(as_it_was + "".join(rest).encode())
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert (await run.shown())["status"] == "closed"
            assert (await run.chat(HI))[0] == 409
            assert await run.end(None) == (200, told)
            assert len(setup.publisher.publications) == 1


async def test_a_run_whose_end_failed_takes_no_turns_after_a_restart(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        away = Shelf(errors=[Unreachable("x")])
        async with capturing(server=server, journal=tmp_path, publisher=away) as setup:
            run = await setup.agent.start()
            await run.say(HI)
            assert (await run.end())[0] == 503
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert (await run.chat(HI))[0] == 409
            assert (await run.end())[0] == 200


async def test_what_is_forgotten_or_dropped_leaves_no_file(tmp_path: Path) -> None:
    async with capturing(journal=tmp_path, limits=RunLimits(max_ended=1)) as setup:
        for uid in "abc":
            run = await setup.agent.start(uid=uid)
            await run.say(HI)
            assert (await run.end())[0] == 200
        dropped = await setup.agent.start()
        await setup.agent.ask("DELETE", f"/v1/runs/{dropped.run_id}")
        assert files(tmp_path) == sorted(["lock", f"{run.run_id}.ended"])


async def test_an_end_that_died_half_way_leaves_one_file(tmp_path: Path) -> None:
    async with RolloutServer("vllm") as server:
        async with capturing(server=server, journal=tmp_path, publisher=Shelf()) as setup:
            run = await setup.agent.start()
            await run.say(HI)
            as_it_was = (tmp_path / f"{run.run_id}.jsonl").read_bytes()
            _, told = await run.end()
        (tmp_path / f"{run.run_id}.jsonl").write_bytes(as_it_was)
        async with capturing(server=server, journal=tmp_path) as setup:
            run.agent = setup.agent
            assert await run.end() == (200, told)
            assert not (tmp_path / f"{run.run_id}.jsonl").exists()
