"""Settings of a plane: units in the names, validated once, read at the entry point.

The environment (`DATAPLANE_…`) fills what a caller leaves out; nothing else reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dataplane.gateway.config import GatewayConfig
from dataplane.wire.address import Tls

MiB = 1 << 20


class Config(BaseSettings):
    """How a plane is hosted and how large it may grow. Unknown settings are refused."""

    model_config = SettingsConfigDict(env_prefix="DATAPLANE_", extra="forbid", frozen=True)

    host: Literal["auto", "embedded", "ray"] = "auto"
    """`ray` where Ray is initialised in this process, else `embedded`: one child process."""
    capacity_bytes: int | None = Field(default=None, ge=4 * MiB)
    """Limit of one value store; the free shared memory where it is not set."""
    segment_bytes: int = Field(default=64 * MiB, ge=4 * MiB)
    """Size of a shared-memory segment; shrunk where shared memory is small."""
    small_put_bytes: int = Field(default=256 << 10, ge=0)
    """Puts up to this size travel through the socket; larger ones are copied in place."""
    shm_dir: Path = Path("/dev/shm")
    """A tmpfs that all clients of the node can see; clients that cannot use TCP."""
    runtime_dir: Path | None = None
    """Sockets, secret and journal; a private folder under the temporary folder if not set."""
    tcp_host: str | None = None
    """Address to listen on for other nodes; the node's own under Ray, none when embedded."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificate, key and authority for TCP connections, all three or none."""
    token_file: Path | None = None
    """Who the client is, for a plane that is reached through a gateway: a file with nothing but
    the token, read again when it changes."""
    ca_file: Path | None = None
    """Who may have signed a gateway's certificate (PEM); the system's authorities if not set."""
    client_cert_file: Path | None = None
    client_key_file: Path | None = None
    """The client's own certificate and key (PEM), where a gateway asks for one: both or none."""
    gateway: GatewayConfig | None = None
    """A gateway that `init` starts with the plane, beside it; none if not set. Under Ray it is one
    of the node that `init` is called on."""
    same_node_reads: bool = True
    """Map segments of the own node; off, everything travels through sockets (for tests)."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of a call that names none."""
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of a call that waits for something to happen, and names none."""
    start_timeout_s: float = Field(default=15.0, gt=0)
    """Deadline of starting a plane."""
    linger_s: float = Field(default=24 * 3600.0, gt=0)
    """A Ray-hosted plane ends after this long without a client."""
    spin_s: float = Field(default=400e-6, ge=0, le=0.01)
    """How long a blocking call looks for its answer before it sleeps, where that keeps paying; on
    virtual machines being woken costs more than most requests. 0 leaves the core to others."""
    reuse_bytes: int = Field(default=1 << 30, ge=0)
    """Memory that a client keeps for results to come; first-touch page faults cost 4x a copy."""
    open_schemas: bool = False
    """Partitions that nobody creates with a schema of their own let a field change its dtype and
    rank, as `schema="open"` does: what the TransferQueue face promises."""
    journal_sync: Literal["none", "interval", "always"] = "none"
    """When the disk is flushed. Acknowledged changes survive the death of the process with each of
    these; a crash of the operating system or a loss of power may take, with `none`, any of the last
    ones; with `interval`, those of the last second (it is flushed once a second); with `always`,
    none of them (it is flushed before each is acknowledged)."""
    snapshot_bytes: int = Field(default=256 * MiB, ge=64 << 10)
    """Bytes of the journal after which a snapshot takes their place; also at least as many as the
    last snapshot has, so that its cost stays in proportion."""
    history_changes: int = Field(default=1_000_000, ge=1)
    history_age_s: float = Field(default=600.0, gt=0)
    """How far back listings since a revision and the judging of late writes reach."""
    metrics_port: int | None = Field(default=None, ge=0, le=65534)
    """Where the plane's processes serve metrics to Prometheus; none if not set, any with 0. Under
    Ray value stores take the port above it. One that is taken is passed over: docs/metrics.md."""
    metrics_host: str | None = None
    """Address that metrics are served on; this machine's own 127.0.0.1, or the node's under Ray."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    """What the plane's own processes log to standard error, and how: docs/logs.md."""
    otel: bool = False
    """Whether clients trace their verbs with OpenTelemetry (extra `otel`): docs/telemetry.md."""
    otel_sample: float = Field(default=1.0, ge=0, le=1)
    """The part of groups that are followed; by a hash, so that all processes follow the same."""
    lineage: Literal["off", "on", "hashes", "previews"] = "on"
    """What `trace` can tell of the last requests: nothing; who wrote, read and cleared what, with
    tags and lengths; also a hash of each value that was put or got; also its first elements.
    Clients make hashes and previews, which costs them time with every value: they are for looking
    for a fault."""
    lineage_bytes: int = Field(default=32 * MiB, ge=64 << 10)
    """Memory of the tag store for it; the oldest requests fall out."""
    label: str = Field(default="", max_length=100)
    """What the client is called where an operator reads of it: `actor dp1`. By itself it says its
    process and host only."""

    @property
    def tls(self) -> Tls | None:
        """The files that wrap TCP connections, where set."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return Tls(self.tls_cert, self.tls_key, self.tls_ca)

    @model_validator(mode="after")
    def _client_certificate_is_whole(self) -> Config:
        if (self.client_cert_file is None) != (self.client_key_file is None):
            raise ValueError("client_cert_file and client_key_file are set together or not at all")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Config:
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(given) and not all(given):
            raise ValueError("tls_cert, tls_key and tls_ca are set together or not at all")
        return self
