"""The blocking face of an outside client: the verbs of `dataplane.Client`, for threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from dataplane.client.get import Layout
from dataplane.client.results import Rows
from dataplane.client.sync import Client
from dataplane.client.tags import Where
from dataplane.config import Config
from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost
from dataplane.outside import (
    claims,
    groups,
    inspecting,
    partitions,
    recording,
    rows,
    tracing,
    watching,
)
from dataplane.outside.reach import Reach, Step, Steps, describe, finished
from dataplane.tags.lineage.lineage import check_stage
from dataplane.telemetry.verbs import span_of
from dataplane.types import Change, Revision

Args = ParamSpec("Args")
Result = TypeVar("Result")

CLOSE_S: Final = 5.0
"""How long the connection may take to close."""


def _blocking(
    verb: Callable[Concatenate[Reach, Args], Steps[Result]],
) -> Callable[Concatenate[OutsideClient, Args], Result]:
    """A verb as a method that waits for it."""

    @wraps(verb)
    def call(client: OutsideClient, *args: Args.args, **named: Args.kwargs) -> Result:
        return client.finish(verb(client.reach, *args, **named))

    call.__doc__ = f"See `Client.{verb.__name__}`."
    return call


class OutsideClient:
    """A client of a plane that is reached through a gateway. Every verb of `Client`, with the same
    arguments, results and errors; `dataplane.outside.rows` says what differs."""

    def __init__(self, address: str, config: Config | None = None) -> None:
        self.reach: Final = Reach(address, config or Config())

    kv_put = _blocking(rows.kv_put)
    kv_batch_put = _blocking(rows.kv_batch_put)
    kv_batch_get = _blocking(rows.kv_batch_get)
    kv_clear = _blocking(rows.kv_clear)
    kv_list = _blocking(watching.kv_list)
    kv_wait = _blocking(watching.kv_wait)
    kv_claim = _blocking(claims.kv_claim)
    kv_commit = _blocking(claims.kv_commit)
    kv_release = _blocking(claims.kv_release)
    begin_group = _blocking(groups.begin_group)
    end_group = _blocking(groups.end_group)
    request_outcome = _blocking(groups.request_outcome)
    kv_create_partition = _blocking(partitions.kv_create_partition)
    kv_list_partitions = _blocking(partitions.kv_list_partitions)
    kv_seal_partition = _blocking(partitions.kv_seal_partition)
    kv_drop_partition = _blocking(partitions.kv_drop_partition)
    explain = _blocking(partitions.explain)
    status = _blocking(partitions.status)
    inspect = _blocking(inspecting.inspect)
    tally = _blocking(inspecting.tally)
    stats = _blocking(inspecting.stats)
    claims = _blocking(inspecting.claims)
    tasks = _blocking(inspecting.tasks)
    waiters = _blocking(inspecting.waiters)
    holdings = _blocking(inspecting.holdings)
    revision_before = _blocking(inspecting.revision_before)
    trace = _blocking(tracing.trace)
    samples = _blocking(recording.samples)
    record = _blocking(recording.record)
    save_checkpoint = _blocking(partitions.save_checkpoint)
    load_checkpoint = _blocking(partitions.load_checkpoint)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """See `Client.stage`."""
        before = self.reach.stage
        self._enter(check_stage(name))
        try:
            with span_of(self.reach, f"stage {name}"):
                yield
        finally:
            self._enter(before)

    def span(
        self, name: str, partition_id: str, *, uids: Iterable[str]
    ) -> AbstractContextManager[None]:
        """See `Client.span`."""
        return span_of(self.reach, name, partition_id, uids)

    def _enter(self, stage: str) -> None:
        with suppress(DataplaneError):
            self.finish(tracing.enter_stage(self.reach, stage))

    @contextmanager
    def kv_view(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        timeout: float | None = None,
    ) -> Generator[Rows]:
        """See `Client.kv_view`; what is looked at is a copy, and may be written to."""
        seen = self.finish(
            rows.kv_view(
                self.reach, keys, partition_id, select_fields, layout=layout, timeout=timeout
            )
        )
        try:
            yield seen
        finally:
            seen.fields = {}

    def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> Iterator[Change]:
        """See `Client.kv_watch`."""
        watch = watching.Watch(partition_id, since, where, self.reach.wait_s(timeout))
        if since is None:
            self.ask(watch.begin)
        return self._told(watch)

    def _told(self, watch: watching.Watch) -> Iterator[Change]:
        try:
            while True:
                yield self.ask(watch.following)
        finally:
            watching.leave(watch, self.reach)

    # -- the plane ---------------------------------------------------------------------------

    @property
    def plane_id(self) -> str:
        """The random id of the plane that this client joined; it accepts no other."""
        return self.reach.plane_id

    @property
    def client_id(self) -> str:
        """The random id of this client, as the gateway knows it."""
        return self.reach.client_id

    @property
    def name(self) -> str:
        """The address of the gateway: outside, a plane has no other name."""
        return self.reach.address

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.reach.closed

    @property
    def revision(self) -> Revision:
        """The latest revision that this client has seen."""
        return self.reach.seen

    def attach(self, *, timeout: float | None = None) -> None:
        """Reach the gateway now rather than with the first verb. PlaneLost if it serves another
        plane than before, Unreachable if nobody answers."""
        self.finish(describe(self.reach, self.reach.seconds(timeout)))

    def run(self, verb: Any, timeout: float | None = None) -> Any:
        """InvalidRequest: faces that are made of a client's own steps need one inside."""
        del verb, timeout
        raise InvalidRequest(
            "this client reaches its plane through a gateway, and has no steps that another face "
            "could be made of: join the plane by its name or its unix socket"
        )

    def close(self, destroy: bool = False) -> None:
        """Let go of the gateway. Repeatable. With `destroy` InvalidRequest, and nothing is closed:
        a plane is ended where it is."""
        refuse_destroy(self.reach, destroy=destroy)
        closing = self.reach.close()
        if closing is not None:
            try:
                closing.result(CLOSE_S)
            except (TimeoutError, CancelledError):
                pass  # it goes on closing, or the process is ending
            if self.reach.spans is not None:
                self.reach.spans.close()

    def __enter__(self) -> OutsideClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OutsideClient(plane {self.reach.plane_id}, {self.reach.address})"

    def __reduce__(self) -> Any:
        raise TypeError("a client does not travel; connect() in the other process instead")

    # -- driving verbs -----------------------------------------------------------------------

    def finish(self, verb: Steps[Result]) -> Result:
        """The result of a verb."""
        if self.reach.closed:
            raise PlaneLost("this client was closed; connect again")
        return finished(verb, self.ask)

    def ask(self, step: Step) -> Any:
        """The answer to one call."""
        answer = self.reach.start(step)
        try:
            return answer.result()
        except CancelledError:
            raise PlaneLost("this client was closed while it waited") from None
        except BaseException:
            answer.cancel()  # of who waits: an interrupt by the keyboard
            raise


# To whoever asks it is one: it has every verb, though none of the code.
Client.register(OutsideClient)


def refuse_destroy(reach: Reach, *, destroy: bool) -> None:
    """InvalidRequest if the plane is to be ended."""
    if destroy:
        raise InvalidRequest(
            f"a plane is not ended from outside: close(destroy=True) where {reach.plane_id} is, "
            "with a client that joined it by its name or its unix socket"
        )


def connect(address: str, config: Config) -> OutsideClient:
    """A client of the plane behind a gateway, which answers.

    Raises:
        InvalidRequest: the address is none, or a file that the settings name cannot be read.
        Unauthenticated: the gateway does not take the token or the certificate.
        Unreachable: nobody answers.
    """
    client = OutsideClient(address, config)
    try:
        client.attach()
    except BaseException:
        client.close()
        raise
    return client
