"""Settings of a gateway: units in the names, validated once, read at the entry point.

The environment (`DATAPLANE_GATEWAY_…`) fills what a caller leaves out; nothing else reads it. No
secret is a setting: those of tokens and keys are the names of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

ROW_OVERHEAD = 1 << 20
"""What a message holds besides the bytes of a chunk, at most."""


class GatewayConfig(BaseSettings):
    """Where a gateway listens, to whom it answers, and how much it takes. Unknown settings are
    refused."""

    model_config = SettingsConfigDict(
        env_prefix="DATAPLANE_GATEWAY_", extra="forbid", frozen=True, allow_inf_nan=False
    )

    listen: Annotated[tuple[str, ...], NoDecode] = Field(default=("127.0.0.1:50051",), min_length=1)
    """Addresses as gRPC takes them: `host:port` (port 0 for any), `[::1]:port`, `unix:/path`. In
    the environment they are separated by commas."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Where it serves metrics to Prometheus; nowhere if not set, any port with 0."""
    metrics_host: str = "127.0.0.1"
    """Address of them. They tell names of partitions, and ask for no credentials."""

    # -- who may call ------------------------------------------------------------------------
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate and key of the gateway, both or none. Looked at again when they change."""
    tls_client_ca: Path | None = None
    """Authority of the certificates that clients must show; none are asked for if not set."""
    token_file: Path | None = None
    """Hashes of tokens, and what each may do. Looked at again when it changes."""
    insecure_allow_anyone: bool = False
    """Listen beyond this machine without credentials: whoever reaches the port may do anything."""
    insecure_allow_plain_text: bool = False
    """Listen beyond this machine without TLS: tokens and rows can be read on the way."""

    # -- sizes -------------------------------------------------------------------------------
    max_message_bytes: int = Field(default=16 * MiB, ge=64 * KiB, le=1 * GiB)
    """One message either way; also one row of an object field."""
    max_put_bytes: int = Field(default=256 * MiB, ge=64 * KiB)
    """All chunks of one put."""
    max_get_bytes: int = Field(default=256 * MiB, ge=64 * KiB)
    """All rows of one get."""
    chunk_bytes: int = Field(default=1 * MiB, ge=4 * KiB)
    """A chunk of what is sent, and the size that clients are told is a good one."""
    buffer_bytes: int = Field(default=1 * GiB, ge=1 * MiB)
    """What all puts that are being received, and all gets that are being sent, hold in memory. A
    call that finds no room waits for it."""
    buffer_share: float = Field(default=0.5, gt=0, le=1)
    """How much of it one principal may hold."""
    max_page_size: int = Field(default=10_000, ge=1, le=65_536)
    """Rows of a page of a listing."""

    # -- times -------------------------------------------------------------------------------
    resume_s: float = Field(default=60.0, ge=0)
    """How long a put that broke off may be resumed. It keeps its memory that long, unless others
    need it."""
    stall_s: float = Field(default=30.0, gt=0)
    """A put that brings nothing for so long, or a get of which nothing is taken, is ended."""
    absence_s: float = Field(default=60.0, gt=0)
    """A client that has made no call for so long has left, and the terms of its leases run."""
    max_call_s: float = Field(default=600.0, gt=0)
    """The longest that a call may take, unless it streams; also where its caller names no
    deadline."""
    page_ttl_s: float = Field(default=60.0, gt=0)
    """How long the rest of a listing is kept between two pages."""
    drain_s: float = Field(default=20.0, ge=0)
    """How long calls may go on when the gateway is ending."""

    # -- counts ------------------------------------------------------------------------------
    max_clients: int = Field(default=10_000, ge=1)
    """Clients that are here at once."""
    max_streams: int = Field(default=2_000, ge=1)
    """Calls under way at once, of all clients."""
    max_connection_streams: int = Field(default=256, ge=1)
    """Calls under way at once on one connection."""
    max_connections: int = Field(default=20_000, ge=1)
    """Connections of one address at once."""

    # -- connections -------------------------------------------------------------------------
    min_ping_s: float = Field(default=10.0, gt=0)
    """A client that pings more often than this is sent away."""
    keepalive_s: float = Field(default=60.0, gt=0)
    """After so long without a sign of it a connection is asked whether its other end is there."""
    keepalive_timeout_s: float = Field(default=20.0, gt=0)
    """And closed if that is not answered within this."""
    handshake_s: float = Field(default=10.0, gt=0)
    """How long a connection may take to say its first words."""
    max_connection_idle_s: float | None = Field(default=None, gt=0)
    """A connection without a call for so long is closed; it costs little, so by default never."""
    max_connection_age_s: float | None = Field(default=None, gt=0)
    """A connection is replaced after so long, for those who balance their load by connections."""

    # -- quarantine --------------------------------------------------------------------------
    vocab_size: int | None = Field(default=None, ge=1)
    """Ids of trajectories are below it; not looked at if it is not known."""
    max_tokens: int = Field(default=1 << 20, ge=1)
    """Tokens of one trajectory."""
    quarantine_bytes: int = Field(default=256 * MiB, ge=1)
    quarantine_rows: int = Field(default=10_000, ge=1)
    """What a quarantine partition may hold; a full one keeps what it has."""

    @property
    def has_tls(self) -> bool:
        """Whether what it listens on beyond unix sockets is TLS."""
        return self.tls_cert is not None

    @property
    def has_credentials(self) -> bool:
        """Whether callers have to show who they are."""
        return self.token_file is not None or self.tls_client_ca is not None

    @field_validator("listen", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("listen")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for listen in value:
            host, _, port = listen.rpartition(":")
            if not listen.startswith("unix:") and not (host and port.isdigit()):
                raise ValueError(f"{listen!r:.120} is neither host:port nor unix:/path")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> GatewayConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are set together or not at all")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        share = int(self.buffer_bytes * self.buffer_share)
        for name in ("max_put_bytes", "max_get_bytes"):
            if getattr(self, name) > share:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) is more than one principal may hold of "
                    f"buffer_bytes ({share}): no such call could ever be served"
                )
        if self.chunk_bytes > self.max_message_bytes - min(
            ROW_OVERHEAD, self.max_message_bytes // 2
        ):
            raise ValueError(
                f"chunk_bytes ({self.chunk_bytes}) has no room in a message of "
                f"max_message_bytes ({self.max_message_bytes})"
            )
        return self
