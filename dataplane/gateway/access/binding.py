"""Where a gateway may listen: without credentials, or without TLS, on this machine only. Pure."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Final

from dataplane.errors import InvalidRequest

_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:")


def check_binding(
    listen: str,
    *,
    has_credentials: bool,
    insecure_allow_anyone: bool,
    has_tls: bool = True,
    insecure_allow_plain_text: bool = False,
) -> None:
    """Raise InvalidRequest unless it is safe to listen there, or the risk was accepted by name.

    `listen` is an address as gRPC takes it: `host:port`, `[::1]:port`, `unix:/path`. Without
    credentials whoever reaches the port may do everything; without TLS tokens and rows can be read
    on the way. Either is refused where others than this machine can connect.
    """
    if is_local(listen):
        return
    if not has_credentials and not insecure_allow_anyone:
        raise InvalidRequest(
            f"listening on {listen!r:.120} without credentials would let everybody who can reach "
            "this address read, write and clear every partition. Give the gateway a token file, "
            "or the authority of its clients' certificates; or listen on 127.0.0.1, or on a unix "
            "socket; or, if this network has only whom you trust, set insecure_allow_anyone "
            "(--insecure-allow-anyone)"
        )
    if has_credentials and not has_tls and not insecure_allow_plain_text:
        raise InvalidRequest(
            f"listening on {listen!r:.120} without TLS would show every token, and every row, to "
            "whoever can listen on the way. Set tls_cert and tls_key; or, if something in front "
            "of the gateway does TLS, set insecure_allow_plain_text "
            "(--insecure-allow-plain-text)"
        )


def is_local(listen: str) -> bool:
    """Whether only processes of this machine can connect to an address. A name other than
    `localhost` is not looked up: who answers for it may change."""
    if listen.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in _SCHEMES:
        listen = listen.removeprefix(scheme)
    host = _host_of(listen)
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _host_of(listen: str) -> str:
    if listen.startswith("["):
        return listen[1:].partition("]")[0]
    # Two colons and no brackets: an IPv6 address without a port.
    return listen if listen.count(":") > 1 else listen.rpartition(":")[0] or listen
