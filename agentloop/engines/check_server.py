"""Asks a rollout server what training from it would rest on, and prints the answers.

    python -m agentloop.engines.check_server http://localhost:8000

Sends a handful of tiny requests, changes nothing at the server. Exit code 0: token ids and
log-probs are exact. 1: it works, but not exactly. 2: it does not answer, or answers wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentloop.engines import probe
from agentloop.engines.http import Http, Limits, ServerError
from agentloop.engines.openai import AUTO, OpenAIEngine
from agentloop.engines.shapes import SHAPES
from agentloop.engines.shapes.checks import as_ids, as_map, first_difference
from agentloop.engines.shapes.reply import Flavour, Reply, Tokens
from agentloop.engines.types import Completion, EngineError, Request, Sampling
from agentloop.trajectory.state import Message

_QUESTION: Final[Message] = {"role": "user", "content": "Say a word."}
_NEXT: Final[Message] = {"role": "user", "content": "And another."}

_ANY_IDS: Final = (5, 6, 7, 8)
"""A prompt for servers that do not show how they tokenize: small ids are in every vocabulary."""

_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: `ok` is None where it decides nothing."""

    question: str
    answer: str
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, in the order in which it is printed."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return 0 if all(finding.ok is not False for finding in self.findings) else 1

    def as_json(self) -> dict[str, Any]:
        return {finding.question: finding.answer for finding in self.findings}

    def as_text(self) -> str:
        width = max(len(finding.question) for finding in self.findings)
        marks = {True: "ok", False: "no", None: "--"}
        return "\n".join(
            f"{marks[finding.ok]}  {finding.question:<{width}}  {finding.answer}"
            for finding in self.findings
        )


async def check_server(
    url: str,
    *,
    flavour: str = AUTO,
    model: str | None = None,
    api_key_env: str | None = None,
    admin_url: str | None = None,
    tokenizer: Tokens | None = None,
    timeout_s: float = 60.0,
) -> Report:
    """What a server is and says. `tokenizer` is needed for servers that give text only.

    Raises:
        EngineError: it does not answer in time, is not known, or its replies break a rule.
    """
    known = None if flavour == AUTO else cast("Flavour", flavour)
    limits = Limits(request_timeout_s=timeout_s, admin_timeout_s=timeout_s)
    http = Http(url, limits, api_key_env=api_key_env)
    admin = http if admin_url is None else Http(admin_url, limits, api_key_env=api_key_env)
    try:
        async with asyncio.timeout(timeout_s):
            server = await probe.server_of(http, flavour=known, model=model)
            chat = _Chat(http, server)
            drift, prompt = await chat.drift()
            is_open = await probe.admin_is_open(admin, server.software, authorize=False)
            is_there = await probe.admin_is_open(admin, server.software, authorize=True)
    except TimeoutError as error:
        raise EngineError(f"{url} did not answer within {timeout_s:g} s") from error
    finally:
        await http.close()
        await admin.close()
    engine = OpenAIEngine(
        url,
        model=server.model,
        flavour=server.flavour,
        tokenizer=tokenizer if tokenizer is not None else _NoTokens(),
        api_key_env=api_key_env,
        on_drift="note",
        limits=limits,
    )
    takes_ids = SHAPES[server.flavour].takes_ids
    request = Request(
        "check-server",
        (prompt or list(_ANY_IDS)) if takes_ids else [],
        Sampling(max_tokens=_TOKENS, seed=0),
        messages=[_QUESTION],
        timeout_s=timeout_s,
    )
    try:
        completion = await engine.generate(request)
    finally:
        await engine.close()
    if completion.ids_source == "retokenized" and tokenizer is not None:
        lost = completion.extra.get("token_drift")
        drift = (
            None if lost is None else f"yes, its text has {-lost:+d} tokens against what it made"
        )
    version = server.version or "of a version that it does not say"
    return Report(
        (
            Finding("server", f"{server.software} {version}, model {server.model}"),
            Finding("endpoint", SHAPES[server.flavour].path),
            _ids(completion, takes_ids=takes_ids),
            _logprobs(completion),
            _versions(completion),
            _drift(drift, matters=not takes_ids),
            _admin(server.software, is_there=is_there, is_open=is_open),
        )
    )


class _NoTokens:
    """Stands in where nobody gave a tokenizer: text becomes no tokens, and nothing is claimed."""

    eos_ids: tuple[int, ...] = ()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = (), /) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int], /) -> str:
        return ""

    def encode(self, text: str, /) -> list[int]:
        return []


class _Chat:
    """Two turns of chat: whether the second has the tokens of the first."""

    def __init__(self, http: Http, server: probe.Server) -> None:
        self._http = http
        self._server = server
        self._shape = SHAPES["sglang-chat" if server.software == "sglang" else "vllm-chat"]

    async def drift(self) -> tuple[int | str | None, list[int] | None]:
        """Where the second turn's prompt departs from the first turn's tokens (None: nowhere), or
        why that cannot be told; and the first prompt."""
        if self._server.software == "transformers":
            return "unknown: it shows no token ids", None
        try:
            first = await self._ask([_QUESTION])
        except ServerError as error:
            if error.status >= 500:
                raise
            return "unknown: it has no chat template", None
        if first.prompt_ids is None or first.token_ids is None:
            return "unknown: it shows no token ids", None
        before = as_ids(first.prompt_ids, "prompt_ids")
        turn = [*before, *as_ids(first.token_ids, "token_ids")]
        answer: Message = {"role": "assistant", "content": first.text or ""}
        second = await self._ask([_QUESTION, answer, _NEXT])
        after = as_ids(second.prompt_ids, "prompt_ids")
        return first_difference(after[: len(turn)], turn), before

    async def _ask(self, messages: list[Message]) -> Reply:
        request = Request("check-chat", [], Sampling(max_tokens=_TOKENS, seed=0), messages=messages)
        body = self._shape.body(request, self._server.model)
        reply = await self._http.post(self._shape.path, body)
        return self._shape.read(as_map(reply, "reply"))


def _ids(completion: Completion, *, takes_ids: bool) -> Finding:
    if completion.ids_source != "engine":
        return Finding("token ids", "no: text is tokenized again", ok=False)
    both = "in and out" if takes_ids else "out; it takes messages"
    return Finding("token ids", f"yes, {both}", ok=True)


def _logprobs(completion: Completion) -> Finding:
    if completion.logprobs is None:
        return Finding("log-probs", "no: the trainer has to recompute them", ok=False)
    meaning = {
        "raw": "raw: before temperature and top-p",
        "processed": "processed: after temperature",
    }.get(completion.logprob_kind or "", "of a kind that could not be told")
    return Finding("log-probs", f"yes, {meaning}", ok=True)


def _versions(completion: Completion) -> Finding:
    source = completion.extra.get("versions_from")
    if source == "spans":
        return Finding("weight versions", f"yes, as spans, now {completion.versions[-1:]}", ok=True)
    if source == "reply":
        return Finding("weight versions", "one for a whole reply, no spans")
    return Finding("weight versions", "no number: set one, or tokens have the engine's own")


def _drift(found: int | str | None, *, matters: bool) -> Finding:
    if isinstance(found, str):
        return Finding("chat drift", found, ok=False if matters else None)
    where = "no" if found is None else f"yes, a second turn departs at token {found} of the first"
    if not matters:
        where += "" if found is None else " (token ids go past the template)"
        return Finding("chat drift", where)
    return Finding("chat drift", where, ok=found is None)


def _admin(software: probe.Software, *, is_there: bool, is_open: bool) -> Finding:
    if not is_there and not is_open:
        return Finding("admin port", f"closed: {software} cannot be paused from here")
    if is_open:
        return Finding("admin port", "open to everybody who reaches it: keep it on a private net")
    return Finding("admin port", "open with the key")


def tokenizer_of(folder: str | None) -> Tokens | None:
    """The tokenizer in a model's folder; None without a folder."""
    if folder is None:
        return None
    from agentloop.loops.chat import ChatTokenizer

    return ChatTokenizer.from_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="check_server", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("url")
    parser.add_argument("--flavour", default=AUTO, choices=[AUTO, *SHAPES])
    parser.add_argument("--model", help="as the server calls it; the first that it lists")
    parser.add_argument("--api-key-env", help="environment variable that holds the key")
    parser.add_argument("--admin-url", help="where pause and update are, if not at url")
    parser.add_argument("--tokenizer", help="the model's folder, for servers that give text only")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    given = parser.parse_args(arguments)
    try:
        report = asyncio.run(
            check_server(
                given.url,
                flavour=given.flavour,
                model=given.model,
                api_key_env=given.api_key_env,
                admin_url=given.admin_url,
                tokenizer=tokenizer_of(given.tokenizer),
                timeout_s=given.timeout,
            )
        )
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(report.as_json()) if given.json else report.as_text()) + "\n")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
