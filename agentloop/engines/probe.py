"""What a server is and what its log-probs are of: found out by asking it.

Owns the questions. Each is small, changes nothing at the server, and has one meaning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast

from agentloop.engines.http import Http, ServerError
from agentloop.engines.shapes import SHAPES
from agentloop.engines.shapes.checks import first_difference
from agentloop.engines.shapes.reply import Flavour
from agentloop.engines.types import Completion, EngineError, LogprobKind, Request, Sampling

Software: TypeAlias = Literal["vllm", "sglang", "transformers"]

_SURE: Final = 1e-3
"""A log-prob so near 0 says nothing: temperature moves it as little as not."""

_NOISE: Final = 0.04
"""By how much of itself a log-prob may differ between two requests for the same token."""

_ADMIN: Final[Mapping[Software, str]] = {"vllm": "/pause", "sglang": "/pause_generation"}


@dataclass(frozen=True, slots=True)
class Server:
    """What a server said of itself."""

    flavour: Flavour
    """The endpoint to ask: the one with token ids in and out, where the server has it."""
    model: str
    version: str | None
    """Of the software."""

    @property
    def software(self) -> Software:
        return cast("Software", self.flavour.split("-")[0])


async def server_of(http: Http, *, flavour: Flavour | None, model: str | None) -> Server:
    """What the server is. `flavour` and `model` are believed where they are given.

    Raises:
        EngineError: it cannot be told what it is; `flavour` then has to be given.
        ServerUnreachable: it does not answer.
    """
    models = [] if flavour and model else await _models(http)
    name = model or next((card["id"] for card in models if isinstance(card.get("id"), str)), None)
    if name is None:
        raise EngineError(f"{http.address} lists no model: say which one to ask for as `model`")
    owner = next((card.get("owned_by") for card in models), None)
    found = flavour or await _flavour(http, owner, name)
    software = found.split("-")[0]
    path = {"vllm": ("/version",), "sglang": ("/server_info", "/get_server_info")}.get(software, ())
    return Server(found, name, await _version(http, path))


async def _flavour(http: Http, owner: object, model: str) -> Flavour:
    if owner == "vllm" or (owner != "sglang" and await _version(http, ("/version",)) is not None):
        # Without token ids in and out, completions still take ids; chat would tokenize again.
        has_ids = await _exists(http, SHAPES["vllm"].path)
        return "vllm" if has_ids else "vllm-completions"
    if owner == "sglang" or await _version(http, ("/server_info", "/get_server_info")) is not None:
        return "sglang"
    # Refused before a model is loaded, by the one server that refuses fields it does not know.
    body: dict[str, Any] = {"model": model, "messages": [], "return_token_ids": True}
    status, told = await http.probe("/v1/chat/completions", body)
    if status == 422 and "return_token_ids" in told:
        return "transformers"
    known = ", ".join(SHAPES)
    raise EngineError(f"{http.address} is no server that is known: say which one of {known} it is")


async def _version(http: Http, paths: Sequence[str]) -> str | None:
    for path in paths:
        status, said = await http.get(path)
        if status != 200 or not isinstance(said, dict):
            continue
        version = cast("Mapping[str, Any]", said).get("version")
        if isinstance(version, str):
            return version[:40]
    return None


async def _exists(http: Http, path: str) -> bool:
    """Whether anything answers there: an empty body is refused, but not as unknown."""
    status, _ = await http.probe(path, {})
    return status not in (404, 405)


async def _models(http: Http) -> list[Mapping[str, Any]]:
    status, listed = await http.get("/v1/models")
    if status in (401, 403):
        raise ServerError(f"{http.address}/v1/models", status, "the key is missing or wrong")
    if status >= 500:
        raise ServerError(f"{http.address}/v1/models", status, "")
    data = cast("Mapping[str, Any]", listed).get("data") if isinstance(listed, dict) else None
    cards = cast("list[object]", data) if isinstance(data, list) else []
    return [cast("Mapping[str, Any]", card) for card in cards if isinstance(card, dict)]


async def admin_is_open(http: Http, software: Software, *, authorize: bool) -> bool:
    """Whether the endpoints that pause and update are there for who comes this way.

    Asked by the wrong method, so that nothing happens.
    """
    path = _ADMIN.get(software)
    if path is None:
        return False
    status, _ = await http.get(path, authorize=authorize)
    return status == 405


async def logprob_kind_of(
    generate: Callable[[Request], Awaitable[Completion]], request: Request
) -> LogprobKind | None:
    """Whether log-probs are before temperature (raw) or after (processed); None if it cannot be
    told, because the server gives none or the model is sure of every token.

    `request` gives the prompt. The likeliest tokens are asked for at temperatures 1 and 0.5: raw
    log-probs do not change. Of a server that renormalizes over the one token that top-k leaves,
    both are 0, so a third request without top-k tells it from a model that is sure.
    """
    sampling = Sampling(max_tokens=min(8, request.sampling.max_tokens), top_k=1, seed=0)
    prompt = replace(request, timeout_s=None)

    async def ask(number: int, **changes: Any) -> Completion:
        return await generate(
            replace(
                prompt,
                request_id=f"{request.request_id}-{number}",
                sampling=replace(sampling, **changes),
            )
        )

    warm, cool = await ask(1), await ask(2, temperature=0.5)
    if not warm.logprobs or not cool.logprobs:
        return None
    differs = first_difference(warm.token_ids, cool.token_ids)
    # The token at which they part still has one prefix, but it is two tokens.
    pairs = list(zip(warm.logprobs[:differs], cool.logprobs[:differs], strict=False))
    telling = [(a, b) for a, b in pairs if min(a, b) < -_SURE]
    if telling:
        noise = sum(_NOISE * -a + _SURE for a, _ in telling)
        if sum(abs(b - a) for a, b in telling) <= noise:
            return "raw"
        # The likeliest token is likelier at a lower temperature, never less likely.
        return "processed" if sum(b - a for a, b in telling) > noise else None
    free = await ask(3, top_k=0)
    return "processed" if free.logprobs and free.logprobs[0] < -_SURE else None
