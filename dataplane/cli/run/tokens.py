"""`dataplane token`: who may call a gateway. Each command changes one token file, in one step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dataplane.cli.commands import Group
from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.shown import value_text
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from dataplane.gateway.access.token_records import Grant, Limits

tokens = typer.Typer(
    name="token",
    cls=Group,
    help="Tokens of a gateway: who may call it, and what for.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FileOption = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="DATAPLANE_GATEWAY_TOKEN_FILE",
        help="The gateway's token file.",
        dir_okay=False,
    ),
]
NameArgument = Annotated[
    str, typer.Argument(help="The principal: by this name its rows and its limits are counted.")
]
PartitionOption = Annotated[
    list[str],
    typer.Option("--partition", help="A partition, or a pattern with *; may be repeated."),
]
RoleOption = Annotated[
    list[str] | None,
    typer.Option("--role", help="producer, consumer, reader or admin; may be repeated."),
]
VerbOption = Annotated[
    list[str] | None,
    typer.Option("--verb", help="A verb beside those of the roles; may be repeated."),
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option("--field", help="A field that may be written or read; all if none is given."),
]
CallsOption = Annotated[float | None, typer.Option("--calls-per-s", help="Limit of calls/s.")]
BytesOption = Annotated[
    float | None, typer.Option("--bytes-per-s", help="Limit of bytes/s, both ways together.")
]
StreamsOption = Annotated[
    int | None, typer.Option("--open-streams", help="Limit of calls under way at once.")
]
ClientsOption = Annotated[
    int | None, typer.Option("--clients", help="Limit of client ids that are here at once.")
]
InflightOption = Annotated[
    int | None,
    typer.Option("--inflight-bytes", help="Limit of bytes that the gateway holds in memory."),
]

COLUMNS: Final = (
    Column("id"),
    Column("principal"),
    Column("expires"),
    Column("may"),
    Column("limits"),
)

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@tokens.command()
def create(
    name: NameArgument,
    file: FileOption,
    partition: PartitionOption,
    role: RoleOption = None,
    verb: VerbOption = None,
    field: FieldOption = None,
    expires: Annotated[
        str, typer.Option(help="30d, 12h …, a date such as 2027-01-31 (UTC), or never.")
    ] = "90d",
    calls_per_s: CallsOption = None,
    bytes_per_s: BytesOption = None,
    open_streams: StreamsOption = None,
    clients: ClientsOption = None,
    inflight_bytes: InflightOption = None,
) -> None:
    """Make a token and print it, once: only its hash is kept.

    Example: dataplane token create rollout-7 --file tokens.json
    --role producer --partition 'train*' --expires 30d > rollout-7.token
    """
    from dataplane.gateway.access.token_disk import change_records
    from dataplane.gateway.access.token_records import limits_record, token_record
    from dataplane.gateway.access.tokens import new_token

    now = datetime.now(UTC).timestamp()
    token = new_token()
    limits = limits_record(
        calls_per_s=calls_per_s, bytes_per_s=bytes_per_s, open_streams=open_streams,
        clients=clients, inflight_bytes=inflight_bytes,
    )  # fmt: skip
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal=name,
        created_s=now,
        expires_s=expiry(expires, now),
        grants=_grants(partition, role, verb, field),
        limits=limits,
    )
    change_records(file, lambda records: (records.with_token(record), None))
    until = "never expires" if record.expires is None else f"expires {_when(record.expires)}"
    typer.echo(f"token {token.id} of {name} {until}; it is not shown again", err=True)
    typer.echo(token.text)


@tokens.command()
def bind(
    name: NameArgument,
    file: FileOption,
    partition: PartitionOption,
    subject: Annotated[
        str,
        typer.Option(
            help="An alternative name of the certificate, or, if it has none, its common name."
        ),
    ],
    role: RoleOption = None,
    verb: VerbOption = None,
    field: FieldOption = None,
    calls_per_s: CallsOption = None,
    bytes_per_s: BytesOption = None,
    open_streams: StreamsOption = None,
    clients: ClientsOption = None,
    inflight_bytes: InflightOption = None,
) -> None:
    """Let who shows a client certificate call without a token (mutual TLS).

    Example: dataplane token bind judge --file tokens.json
    --subject judge.example.org --role consumer --partition 'train*'
    """
    from dataplane.gateway.access.token_disk import change_records
    from dataplane.gateway.access.token_records import certificate_record, limits_record

    limits: Limits = limits_record(
        calls_per_s=calls_per_s, bytes_per_s=bytes_per_s, open_streams=open_streams,
        clients=clients, inflight_bytes=inflight_bytes,
    )  # fmt: skip
    record = certificate_record(
        subject=subject,
        principal=name,
        grants=_grants(partition, role, verb, field),
        limits=limits,
    )
    change_records(file, lambda records: (records.with_certificate(record), None))
    typer.echo(f"certificates of {subject} stand for {name}", err=True)


@tokens.command(name="list")
def list_tokens(file: FileOption, output: OutputOption = Output.TABLE) -> None:
    """Show every token and certificate, without anything secret.

    Example: dataplane token list --file tokens.json
    """
    from dataplane.gateway.access.token_disk import read_records

    records = read_records(file)
    now = datetime.now(UTC).timestamp()
    rows = [
        {
            "id": token.id,
            "principal": token.name,
            "expires": None if token.expires is None else _when(token.expires),
            "expired": token.has_expired(now),
            **_may(token.grants, token.limits),
        }
        for token in records.tokens
    ]
    rows += [
        {
            "id": f"certificate {bound.subject}",
            "principal": bound.name,
            "expires": None,
            "expired": False,
            **_may(bound.grants, bound.limits),
        }
        for bound in records.certificates
    ]
    if output is Output.TABLE:
        rows = [{**row, **_in_words(row)} for row in rows]
    print_rows(rows, COLUMNS, output, empty="there is no token")


@tokens.command()
def revoke(
    names: Annotated[
        list[str],
        typer.Argument(help="Ids of tokens, subjects of certificates, or principals with all."),
    ],
    file: FileOption,
) -> None:
    """Take tokens or certificates away. Gateways notice within a second, and end their streams.

    Example: dataplane token revoke mzxw6ytboi2w --file tokens.json
    """
    from dataplane.gateway.access.redaction import redact
    from dataplane.gateway.access.token_disk import change_records

    wanted = frozenset(names)
    gone = change_records(file, lambda records: records.without(wanted))
    for each in gone:
        typer.echo(f"revoked {each}", err=True)
    if not gone:
        raise InvalidRequest(
            f"token file {file} has none of {redact(', '.join(names))}; "
            "`dataplane token list` shows what it has"
        )


def expiry(text: str, now_s: float) -> float | None:
    """When it expires, in seconds since 1970; None for never. InvalidRequest if that is past."""
    if text == "never":
        return None
    span = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    try:
        if span is not None:
            at = now_s + int(span[1]) * _UNITS[span[2]]
            datetime.fromtimestamp(at, UTC)  # a year that is too far is refused here
        else:
            moment = datetime.fromisoformat(text)
            at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"{text!r:.40} is no expiry: give 30d, 12h, 2027-01-31 or never"
        ) from None
    if at <= now_s:
        raise InvalidRequest(f"expiry {text!r:.40} is past already")
    return at


def _grants(
    partitions: list[str],
    roles: list[str] | None,
    verbs: list[str] | None,
    fields: list[str] | None,
) -> tuple[Grant, ...]:
    from dataplane.gateway.access.token_records import grant_record

    if not roles and not verbs:
        raise InvalidRequest("say what it may do, with --role or --verb")
    return tuple(
        grant_record(
            partition=partition,
            roles=tuple(roles or ()),
            verbs=tuple(verbs or ()),
            fields=tuple(fields) if fields else None,
        )
        for partition in partitions
    )


def _may(grants: Iterable[Grant], limits: Limits) -> dict[str, Any]:
    """What a principal may do and how much of it, as JSON has it."""
    return {
        "may": [
            {
                "partition": grant.partition,
                "roles": list(grant.roles),
                "verbs": list(grant.verbs),
                "fields": None if grant.fields is None else list(grant.fields),
            }
            for grant in grants
        ],
        "limits": limits.model_dump(exclude_none=True),
    }


def _in_words(row: dict[str, Any]) -> dict[str, str]:
    """The same for people."""
    said: list[str] = []
    for grant in row["may"]:
        text = f"{'+'.join((*grant['roles'], *grant['verbs']))} in {grant['partition']}"
        if grant["fields"] is not None:
            text += f" ({', '.join(grant['fields'])})"
        said.append(text)
    expires = "-" if row["id"].startswith("certificate ") else row["expires"] or "never"
    limits = ", ".join(f"{name} {value_text(value)}" for name, value in row["limits"].items())
    return {
        "expires": f"{expires} (expired)" if row["expired"] else expires,
        "may": "; ".join(said),
        "limits": limits or "none",
    }


def _when(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
