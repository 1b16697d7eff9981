"""The settings of a capture: its upstream, its limits, and where trajectories go.

Owns defaults and checks. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from agentloop.engines.http import Limits
from agentloop.engines.types import LogprobKind

OnIdle: TypeAlias = Literal["publish", "drop"]

CHATS: Final = ("vllm-chat", "sglang-chat")
"""Flavours of servers whose chat says which tokens it was asked with and which it made."""


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """The server that answers."""

    url: str
    flavour: str = "auto"
    """vllm-chat or sglang-chat; auto asks the server what it is."""
    model: str | None = None
    """As the server calls it; None takes the first that it lists. Agents get it whatever model
    they name: what is captured is what is trained."""
    api_key_env: str | None = None
    """The environment variable that holds the server's key."""
    logprob_kind: LogprobKind | Literal["probe"] | None = "probe"
    """What its log-probs are of; probe finds it out with a few tiny requests."""
    vocab_size: int | None = None
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters that are sent whatever the agent asks, such as temperature."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.flavour not in ("auto", *CHATS):
            raise ValueError(f"flavour is auto, {' or '.join(CHATS)}, not {self.flavour!r}")


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How much of everything runs may take, and for how long."""

    max_runs: int = 1024
    """Runs that have not ended."""
    max_turns: int = 512
    """Of one run, those under way included."""
    max_run_bytes: int = 64 << 20
    """Of what is kept of one run's turns."""
    max_bytes: int = 4 << 30
    """Of what is kept of all runs."""
    max_requests: int = 1024
    """Chat requests under way at once."""
    max_body_bytes: int = 16 << 20
    """Of one request."""
    max_ended: int = 10_000
    """Runs that have ended whose answers are still known."""
    idle_s: float = 3600.0
    """A run that nobody has asked anything for so long ends by itself."""
    on_idle: OnIdle = "publish"
    """What becomes of it: published, as aborted if it has no reward, or dropped."""
    max_lag: int | None = None
    """How many steps of the trainer a run may lag behind; None: any number."""

    def __post_init__(self) -> None:
        for name in (
            "max_runs", "max_turns", "max_run_bytes", "max_bytes", "max_requests",
            "max_body_bytes", "max_ended",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if not self.idle_s > 0:
            raise ValueError(f"idle_s is above 0, not {self.idle_s}")
        if self.on_idle not in ("publish", "drop"):
            raise ValueError(f"on_idle is publish or drop, not {self.on_idle!r}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag is at least 0, not {self.max_lag}")


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """Everything that a capture is started with, its keys aside."""

    upstream: UpstreamSettings
    partition_id: str = "train"
    task_name: str = "capture"
    """Of runs that name no task."""
    limits: RunLimits = RunLimits()
    journal: Path | None = None
    """A folder in which runs are written down, so that another process can go on with them."""
    agents_may_reward: bool = True
    """Whether a run's own key may set its reward and end it; else only the server's key may."""
    max_quarantined: int = 1000
    """Refused replies that are kept for people to look at; further ones are only counted."""
