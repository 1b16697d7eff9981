"""An engine over any transformers causal language model, in this process.

Owns the asyncio face, and how a model is loaded. A thread of its own computes (`hf_worker.py`);
the event loop is never blocked. What is sampled, and its log-probs, are exact: `hf_sampling.py`.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentloop.engines.hf_row import Row
from agentloop.engines.hf_sampling import check_sampling
from agentloop.engines.hf_worker import Worker
from agentloop.engines.types import Completion, EngineError, LogprobKind, Request

if TYPE_CHECKING:
    import torch


class HFEngine:
    """Generates with a transformers model, in batches that requests join and leave by themselves.

    - Log-probs are `processed` by default: of the very distribution that the token was drawn from
      (penalties, temperature, top-k, top-p). `logprob_kind="raw"` gives the model's own. A request
      at temperature 0 takes the best token after penalties; its log-probs are always `raw`.
    - The same seed gives the same tokens, whatever else is in the batch and wherever a response
      was interrupted.
    - New weights take effect between two tokens. Requests under way go on: what they have keeps
      its version, and the cache is computed again, so that each later token comes from the new
      weights alone.
    - Routed experts (`Sampling.routed_experts`) are those that the routers chose when the token
      was fed, one row less than there are tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        version: int = 0,
        device: str | None = None,
        dtype: str | None = None,
        logprob_kind: LogprobKind = "processed",
        eos_token_ids: Sequence[int] | None = None,
        max_batch: int = 64,
        batch_window_s: float = 0.002,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Load a model, if it is not loaded yet, and start its thread.

        Args:
            model: A folder that `save_pretrained` wrote (safetensors only: nothing is unpickled),
                a configuration or a map of one with `model_type` (random weights, by `seed`), or a
                model, which is the engine's from here on.
            tokenizer: A tokenizer or its folder; None takes the model's folder, if it has one.
                Without one there is no text, and stop strings are refused.
            version: Policy version of these weights.
            device: Where to compute; None leaves the model where it is.
            dtype: Such as `bfloat16`; None takes the one it was saved with.
            eos_token_ids: What ends every response; None takes the model's generation
                configuration and the tokenizer's.
            max_batch: Rows generated at a time. Others wait.
            batch_window_s: How long the first request of a batch waits for others.
            threads: Of torch, in the engine's thread; None leaves it to torch.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch is a number of rows from 1 on, not {max_batch}")
        if logprob_kind not in ("processed", "raw"):
            raise ValueError(f"logprob_kind is processed or raw, not {logprob_kind!r}")
        loaded = _load_model(model, dtype, seed)
        if device is not None:
            loaded = loaded.to(device)
        self._model = loaded.eval()
        self._tokenizer = _load_tokenizer(model if tokenizer is None else tokenizer)
        self._eos_ids = frozenset(
            _eos_ids(loaded, self._tokenizer) if eos_token_ids is None else eos_token_ids
        )
        self._context = getattr(loaded.config, "max_position_embeddings", None)
        self._vocabulary = int(loaded.get_input_embeddings().weight.shape[0])
        self._kind: LogprobKind = logprob_kind
        self._paused = False
        self._closed = False
        self._rows: dict[int, Row] = {}
        self._worker = Worker(
            loaded,
            version=version,
            kind=logprob_kind,
            max_batch=max_batch,
            window_s=batch_window_s,
            threads=threads,
        )

    @property
    def policy_version(self) -> int:
        return self._worker.version

    @property
    def tokens_generated(self) -> int:
        """Since the engine began."""
        return self._worker.tokens_generated

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        limit = self._checked(request)
        if self._paused or limit == 0:
            return self._empty(request, "abort" if self._paused else "length")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()

        def settle(outcome: Completion | EngineError) -> None:
            try:
                loop.call_soon_threadsafe(_answer, answer, outcome)
            except RuntimeError:
                pass  # the loop has ended, and with it whoever asked

        seed = request.sampling.seed
        row = Row(
            request=request,
            limit=limit,
            eos_ids=self._eos_ids,
            seed=secrets.randbits(63) if seed is None else seed,
            decode=self._decode,
            settle=settle,
        )
        self._rows[id(row)] = row
        try:
            self._worker.submit(row)
            async with asyncio.timeout(request.timeout_s):
                return await answer
        except TimeoutError:
            raise EngineError(
                f"request {request.request_id!r} had {len(row.made)} of {limit} tokens when its "
                f"{request.timeout_s} s were over"
            ) from None
        finally:
            row.abandoned = not answer.done() or answer.cancelled()
            del self._rows[id(row)]

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        for row in self._rows.values():
            if row.request.request_id == request_id:
                row.abort_requested = True

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._paused = True
        await asyncio.wrap_future(self._worker.stop_rows())

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._paused = False

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights in place, between two tokens; returns when it is done.

        The tensors are read until then. All parameters must be there, with their names, shapes
        and dtypes; see `replace_weights` for tied ones.

        Raises:
            WeightsError: they do not fit; the engine goes on with those it had.
        """
        await asyncio.wrap_future(self._worker.replace(weights, version))

    async def close(self) -> None:
        """End the thread; what is under way fails. Repeatable."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._worker.close)

    def _checked(self, request: Request) -> int:
        """How many tokens the request may have; EngineError if it cannot be answered at all."""
        sampling, asked = request.sampling, request.token_ids
        check_sampling(sampling)
        if not len(asked):
            raise EngineError(f"request {request.request_id!r} has no tokens")
        if not 0 <= min(asked) <= max(asked) < self._vocabulary:
            raise EngineError(
                f"request {request.request_id!r} has token ids from {min(asked)} to {max(asked)}; "
                f"the model knows 0 to {self._vocabulary - 1}"
            )
        if sampling.stop and self._tokenizer is None:
            raise EngineError("stop strings need a tokenizer, and this engine has none")
        if sampling.routed_experts and not self._worker.records_experts:
            raise EngineError(f"{type(self._model).__name__} has no routers to record")
        if self._context is None:
            return sampling.max_tokens
        if len(asked) >= self._context:
            raise EngineError(
                f"request {request.request_id!r} has {len(asked)} tokens, and the model's context "
                f"is {self._context}: no token fits behind them"
            )
        return min(sampling.max_tokens, self._context - len(asked))

    def _empty(self, request: Request, reason: str) -> Completion:
        row = Row(request, 0, self._eos_ids, 0, self._decode, lambda outcome: None)
        row.finish(reason)
        return row.completion(self._kind)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _answer(answer: asyncio.Future[Completion], outcome: Completion | EngineError) -> None:
    if answer.done():
        return
    if isinstance(outcome, Completion):
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)


def _load_model(model: Any, dtype: str | None, seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    random: Any = torch.random
    configs: Any = AutoConfig
    number = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(number, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}")
    automatic: Any = AutoModelForCausalLM
    if isinstance(model, (str, Path)):
        if not Path(model).is_dir():
            raise EngineError(f"there is no folder {str(model)!r} to load a model from")
        return automatic.from_pretrained(
            model, dtype=number or "auto", local_files_only=True, use_safetensors=True
        )
    if isinstance(model, Mapping):
        settings: dict[str, Any] = dict(model)  # pyright: ignore[reportUnknownArgumentType] (user input)
        model = configs.for_model(**settings)
    if isinstance(model, PreTrainedConfig):
        with random.fork_rng(devices=[]):
            random.manual_seed(seed)
            return automatic.from_config(model, **({} if number is None else {"dtype": number}))
    return model if number is None else model.to(number)


def _load_tokenizer(source: Any) -> Any:
    """A tokenizer of the engine's own: it is used from another thread than the caller's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if isinstance(source, PreTrainedTokenizerBase):
        return copy.deepcopy(source)
    if isinstance(source, (str, Path)):
        loader: Any = AutoTokenizer
        return loader.from_pretrained(source, local_files_only=True)
    return None


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for told in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(told, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return found
