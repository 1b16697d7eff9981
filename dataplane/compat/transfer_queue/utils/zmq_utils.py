"""Names of TransferQueue's ZeroMQ layer that others import. Nothing here speaks ZeroMQ: this plane
exchanges frames (dataplane/wire), which carry no pickle."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any


class ZMQServerInfo:
    """A server of TransferQueue's: its role, its id, and its ports by name."""

    def __init__(self, role: Any, id: str, ip: str, ports: Mapping[str, int]) -> None:
        self.role = role
        self.id = id
        self.ip = ip
        self.ports = dict(ports)

    def to_addr(self, port_name: str) -> str:
        """The address of one of its ports."""
        return format_zmq_address(self.ip, self.ports[port_name])

    def to_dict(self) -> dict[str, Any]:
        """Its parts by name."""
        return {"role": self.role, "id": self.id, "ip": self.ip, "ports": self.ports}

    def __str__(self) -> str:
        return f"ZMQServerInfo({self.role}, {self.id}, {self.ip}, {self.ports})"


def is_ipv6_address(ip: str) -> bool:
    """Whether it is an IPv6 address."""
    try:
        socket.inet_pton(socket.AF_INET6, ip)
    except OSError:
        return False
    return True


def format_zmq_address(ip: str, port: int) -> str:
    """The address as `tcp://host:port`, an IPv6 host in brackets."""
    return f"tcp://[{ip}]:{port}" if is_ipv6_address(ip) else f"tcp://{ip}:{port}"


def get_node_ip_address() -> str:
    """This node's address as Ray has it, without brackets."""
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
