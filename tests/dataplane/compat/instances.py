"""Instances without Ray, for tests: a controller that ends and begins, and clients of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from transfer_queue import (
    SequentialSampler,
    TransferQueueClient,
)
from transfer_queue.control.serving import ControllerServer
from transfer_queue.link import Link
from transfer_queue.sampler import BaseSampler

from dataplane.config import Config
from dataplane.host import embedded

WAIT_S = 20.0


class Instance:
    """A controller that tests end and begin, and a client of it."""

    def __init__(self, host: embedded.EmbeddedHost, config: Config, **options: Any) -> None:
        self.host = host
        self.config = config
        self.options: dict[str, Any] = {"polling_mode": True, **options}
        self.links: list[Link] = []
        self.start()
        self.client = self.join()

    def start(self, sampler: BaseSampler | None = None) -> None:
        options = dict(self.options)
        sampler = sampler or options.pop("sampler", SequentialSampler)()
        options.pop("sampler", None)
        self.server = ControllerServer(self.host.joined.name, self.config, sampler, **options)
        self.server.up()

    def join(self, **settings: Any) -> TransferQueueClient:
        address = self.host.joined.tags.unix
        info = {"plane": self.host.joined.name, "address": address}
        link = Link.at(info, self.config.model_copy(update=settings))
        self.links.append(link)
        return TransferQueueClient("test", info, link=link)

    def restart(self) -> None:
        self.server.stop()
        self.start()


Make = Callable[..., Instance]


def data(count: int, **fields: Any) -> TensorDict:
    return TensorDict({"x": torch.arange(count), **fields}, batch_size=count)


def name() -> str:
    return f"p-{secrets.token_hex(4)}"


def put(client: TransferQueueClient, p: str, keys: list[str], **fields: Any) -> None:
    client.link.sync.kv_batch_put(
        keys, p, fields or None, [{"status": "new", "at": at} for at in range(len(keys))]
    )
