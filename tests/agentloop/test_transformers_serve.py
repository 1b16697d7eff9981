"""A real `transformers serve` with a tiny model: what it takes, gives, and what is made of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.engines.check_server import check_server
from agentloop.engines.http import ServerError
from agentloop.engines.openai import OpenAIEngine
from agentloop.engines.types import Completion, EngineError, Request, Sampling
from agentloop.loops.chat import ChatTokenizer
from agentloop.tiny import make_tiny_model
from tests.deadline import eventually, eventually_async

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is the sum?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(model.parent / "home"),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    log = model.parent / "serve.log"
    command = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-c", command, "serve", str(model),
                "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
            ],
            env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    try:
        eventually(answers, "transformers serve answers", within_s=100)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(str(model))


@pytest.fixture
async def engine(url: str, tokenizer: ChatTokenizer) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine(url, tokenizer=tokenizer, version=4)
    yield engine
    await engine.close()


def _request(tokenizer: ChatTokenizer, name: str = "r", **sampling: Any) -> Request:
    given = {"max_tokens": 12, "seed": 1, **sampling}
    prompt = tokenizer.prompt(MESSAGES)
    return Request(name, prompt, Sampling(**given), messages=MESSAGES, timeout_s=60)


async def test_it_is_found_out_and_answers_with_text_that_is_tokenized_again(
    engine: OpenAIEngine, tokenizer: ChatTokenizer
) -> None:
    found = await engine.generate(_request(tokenizer))
    assert (found.ids_source, found.logprobs, found.logprob_kind) == ("retokenized", None, None)
    assert found.token_ids
    assert found.versions == [4] * len(found.token_ids)
    assert found.finish_reason in ("stop", "length")
    text = found.token_ids[:-1] if found.token_ids[-1] in tokenizer.eos_ids else found.token_ids
    assert text == tokenizer.encode(found.text)
    assert {"token_ids", "logprobs", "prompt_ids", "versions"} == set(found.extra["missing"])
    # Its template is the tokenizer's own, so it was asked with what we think.
    assert "prompt_drift" not in found.extra


async def test_it_samples_where_it_is_asked_to_and_is_greedy_where_not(
    engine: OpenAIEngine, tokenizer: ChatTokenizer
) -> None:
    """Without `do_sample` in what is sent it would be greedy always."""

    async def texts(**sampling: Any) -> list[str]:
        one_by_one: list[Completion] = []
        for seed in range(4):
            request = _request(tokenizer, **{**sampling, "seed": seed})
            one_by_one.append(await engine.generate(request))
        return [completion.text for completion in one_by_one]

    warm = await texts(temperature=1.0)
    assert len(set(warm)) > 1
    assert warm == await texts(temperature=1.0)
    greedy = await texts(temperature=0.0)
    assert len(set(greedy)) == 1
    assert await texts(temperature=1.0, top_k=1) == greedy


async def test_tokens_are_limited_and_stop_strings_stop(
    engine: OpenAIEngine, tokenizer: ChatTokenizer
) -> None:
    greedy = await engine.generate(_request(tokenizer, temperature=0.0, max_tokens=20))
    short = await engine.generate(_request(tokenizer, temperature=0.0, max_tokens=3))
    assert greedy.text.startswith(short.text)
    assert (short.finish_reason, len(short.text) < len(greedy.text)) == ("length", True)
    letter = next(c for c in greedy.text[1:] if c.isascii() and c.isprintable() and c != " ")
    stopped = await engine.generate(
        _request(tokenizer, temperature=0.0, max_tokens=20, stop=(letter,))
    )
    assert stopped.finish_reason == "stop"
    assert letter in stopped.text
    assert len(stopped.text) <= greedy.text.index(letter) + 8


async def test_several_requests_at_once(engine: OpenAIEngine, tokenizer: ChatTokenizer) -> None:
    found = await asyncio.gather(
        *(engine.generate(_request(tokenizer, f"r{i}", max_tokens=4)) for i in range(4))
    )
    assert [completion.ids_source for completion in found] == ["retokenized"] * 4


async def test_tools_go_into_its_template(engine: OpenAIEngine, tokenizer: ChatTokenizer) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    prompt = tokenizer.prompt(MESSAGES, tools)
    request = Request("t", prompt, Sampling(max_tokens=4), messages=MESSAGES, tools=tools)
    found = await engine.generate(request)
    assert found.token_ids
    assert "prompt_drift" not in found.extra


async def test_what_it_cannot_do_is_refused_before_it_is_sent(
    engine: OpenAIEngine, tokenizer: ChatTokenizer
) -> None:
    with pytest.raises(EngineError, match="presence_penalty"):
        await engine.generate(_request(tokenizer, presence_penalty=0.5))


async def test_asked_in_another_servers_shape_it_refuses(
    url: str, tokenizer: ChatTokenizer
) -> None:
    engine = OpenAIEngine(url, flavour="vllm-chat", tokenizer=tokenizer, logprob_kind="raw")
    with pytest.raises(ServerError) as refused:
        await engine.generate(_request(tokenizer))
    await engine.close()
    assert refused.value.status == 422


async def test_pause_ends_its_requests_here(engine: OpenAIEngine, tokenizer: ChatTokenizer) -> None:
    await engine.generate(_request(tokenizer, max_tokens=1))
    task = asyncio.ensure_future(
        engine.generate(_request(tokenizer, "long", max_tokens=400, min_tokens=400))
    )

    async def is_sent() -> bool:
        return any(call.server_ids for call in engine._calls.named("long"))

    await eventually_async(is_sent, "the request is at the server")
    await engine.pause()
    assert ((await task).finish_reason, (await task).token_ids) == ("abort", [])
    await engine.resume()
    assert (await engine.generate(_request(tokenizer, max_tokens=2))).finish_reason != "abort"


async def test_the_check_says_what_it_is_good_for(url: str, tokenizer: ChatTokenizer) -> None:
    report = await check_server(url, tokenizer=tokenizer)
    answers = {finding.question: finding.answer for finding in report.findings}
    assert answers["server"].startswith("transformers")
    assert answers["token ids"].startswith("no")
    assert answers["log-probs"].startswith("no")
    assert report.exit_code == 1
