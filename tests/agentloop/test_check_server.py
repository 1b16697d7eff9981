"""`check_server` says what training from a server would rest on."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from agentloop.engines.check_server import Report, check_server, main
from agentloop.engines.types import EngineError
from tests.agentloop.rollout_server import LETTERS, RolloutServer


async def _report(
    software: str, arguments: dict[str, Any] | None = None, **switches: Any
) -> Report:
    async with RolloutServer(software, **switches) as server:
        report = await check_server(server.url, timeout_s=20, **(arguments or {}))
        # Nothing at the server has changed, and nothing was left behind.
        assert (server.paused, server.running, server.version) == (
            False,
            {},
            switches.get("version", "0"),
        )
        return report


def _answers(report: Report) -> dict[str, str]:
    return {finding.question: finding.answer for finding in report.findings}


async def test_vllm_with_everything() -> None:
    report = await _report("vllm", raw_logprobs=False, version="12")
    answers = _answers(report)
    assert answers["server"] == "vllm 0.33.0, model m"
    assert answers["endpoint"] == "/inference/v1/generate"
    assert answers["token ids"] == "yes, in and out"
    assert answers["log-probs"] == "yes, processed: after temperature"
    assert answers["weight versions"] == "yes, as spans, now [12]"
    assert answers["chat drift"] == "no"
    assert answers["admin port"].startswith("open to everybody")
    assert report.exit_code == 0


async def test_sglang_with_everything() -> None:
    report = await _report("sglang", raw_logprobs=True, version="12")
    answers = _answers(report)
    assert answers["server"] == "sglang 0.5.23, model m"
    assert answers["log-probs"] == "yes, raw: before temperature and top-p"
    assert answers["weight versions"] == "one for a whole reply, no spans"
    assert report.exit_code == 0


async def test_transformers_works_but_not_exactly() -> None:
    report = await _report("transformers")
    answers = _answers(report)
    assert answers["token ids"] == "no: text is tokenized again"
    assert answers["log-probs"] == "no: the trainer has to recompute them"
    assert answers["chat drift"] == "unknown: it shows no token ids"
    assert answers["admin port"].startswith("closed")
    assert report.exit_code == 1


async def test_with_a_tokenizer_text_is_compared_with_what_was_counted() -> None:
    def one_more(reply: dict[str, Any]) -> None:
        reply["usage"]["completion_tokens"] += 2

    tokens = {"tokenizer": LETTERS}
    assert _answers(await _report("transformers", tokens))["chat drift"] == "no"
    drifted = _answers(await _report("transformers", tokens, edit=one_more))
    assert drifted["chat drift"] == "yes, its text has -2 tokens against what it made"


async def test_a_label_that_is_no_number_is_no_version() -> None:
    answers = _answers(await _report("vllm", version="default"))
    assert answers["weight versions"].startswith("no number")


async def test_drift_of_a_chat_endpoint_fails_only_who_depends_on_it() -> None:
    class Drifting(RolloutServer):
        """Its template writes the first turn differently once another follows."""

        def _asked(self, path: str, body: dict[str, Any]) -> Any:
            self.prompt_shift = [9] if len(body.get("messages", [])) > 1 else []
            return super()._asked(path, body)

    async with Drifting("vllm") as server:
        by_ids = await check_server(server.url)
        by_chat = await check_server(server.url, flavour="vllm-chat")
    assert _answers(by_ids)["chat drift"].startswith("yes, a second turn departs at token 0")
    assert by_ids.exit_code == 0
    assert _answers(by_chat)["token ids"] == "yes, out; it takes messages"
    assert by_chat.exit_code == 1


async def test_a_server_that_gives_no_log_probs_is_said_to_give_none() -> None:
    def blank(reply: dict[str, Any]) -> None:
        reply["choices"][0]["logprobs"] = None

    report = await _report("vllm", edit=blank)
    assert _answers(report)["log-probs"].startswith("no")
    assert report.exit_code == 1


async def test_a_model_without_a_chat_template_is_checked_with_ids() -> None:
    class Base(RolloutServer):
        async def _generation(self, request: Any, body: dict[str, Any]) -> Any:
            if "messages" in body:
                self.refusals = [(400, {})]
            return await super()._generation(request, body)

    async with Base("vllm") as server:
        report = await check_server(server.url)
    assert _answers(report)["chat drift"] == "unknown: it has no chat template"
    assert report.exit_code == 0


async def test_the_key_guards_the_endpoints_but_not_the_admin_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "k")
    report = await _report("vllm", {"api_key_env": "ROLLOUT_KEY"}, key="k")
    assert _answers(report)["admin port"].startswith("open to everybody")
    report = await _report("vllm", {"api_key_env": "ROLLOUT_KEY"}, key="k", admin_key=True)
    assert _answers(report)["admin port"] == "open with the key"
    with pytest.raises(EngineError, match="401"):
        await _report("vllm", key="k")


async def test_a_server_that_hangs_is_an_error_in_time() -> None:
    async with RolloutServer("sglang", hangs=9) as server:
        with pytest.raises(EngineError, match="within"):
            await check_server(server.url, timeout_s=0.3)


async def test_the_command_prints_a_table_and_ends_with_its_code() -> None:
    async with RolloutServer("vllm") as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentloop.engines.check_server", server.url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (0, b"")
    lines = out.decode().splitlines()
    assert len(lines) == 7
    assert lines[0] == "--  server           vllm 0.33.0, model m"
    assert lines[2] == "ok  token ids        yes, in and out"


async def test_the_command_says_it_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    async with RolloutServer("transformers") as server:
        code = await asyncio.to_thread(main, [server.url, "--json"])
    assert code == 1
    assert json.loads(capsys.readouterr().out)["token ids"].startswith("no")


def test_no_server_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
