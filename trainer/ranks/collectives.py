"""The ranks that train one model together, and what they tell each other. Owns the process group.

Every method but `alone`, `join` and `close` is entered by all ranks, or none of them returns. What
travels is numbers, and the text of an error: nothing is pickled.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class PeerFailed(RuntimeError):
    """Another rank could not go on, so none does."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error

    def __str__(self) -> str:
        return f"rank {self.rank} failed, and the others stopped with it: {self.error}"


class PeersLost(RuntimeError):
    """Another rank is gone, or did not come in time. This group of ranks is of no more use."""


class Peers:
    """This rank among the ranks that train with it."""

    def __init__(self, rank: int, world_size: int, device: torch.device, *, joined: bool) -> None:
        """Use `alone` or `join`."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._joined = joined

    @classmethod
    def alone(cls, device: str = "cpu") -> Peers:
        """The one rank that there is."""
        return cls(0, 1, _device(device), joined=False)

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        meeting: str | Store,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> Peers:
        """This rank, once all others have come too.

        Args:
            meeting: where ranks meet: a store that they all reach, `tcp://host:port` with a port
                that is free where rank 0 is, or `file:///path` of a file that is not there yet.
            device: `cpu` (gloo), or `cuda` (nccl; what lies in host memory still goes by gloo).
            timeout_s: how long a collective waits for the others.

        Raises:
            PeersLost: they did not come.
        """
        place = _device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        by_name = isinstance(meeting, str)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
                init_method=meeting if by_name else None,
                store=None if by_name else meeting,
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            where = meeting if by_name else "their store"
            raise PeersLost(
                f"rank {rank} did not meet the other {world_size - 1} at {where}: {error}"
            ) from error
        return cls(rank, world_size, place, joined=True)

    def close(self) -> None:
        """Leave. Ranks that still wait for this one are told, where the backend can."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    # -- numbers -----------------------------------------------------------------------------

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the tensor's own memory."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each entry over ranks, in the tensor's own memory."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def all_reduce_min(self, tensor: torch.Tensor) -> torch.Tensor:
        """The smallest of each entry over ranks, in the tensor's own memory."""
        return self._reduce(tensor, dist.ReduceOp.MIN)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """What rank `source` has in this tensor, in the tensor's own memory."""
        if self.world_size > 1:
            try:
                dist.broadcast(tensor, source)
            except RuntimeError as error:
                self._lost(error)
        return tensor

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of all ranks, in rank order; they are of one shape."""
        if self.world_size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            cast("Any", dist).all_gather(found, tensor)
        except RuntimeError as error:
            self._lost(error)
        return found

    # -- errors ------------------------------------------------------------------------------

    def agree(self, error: BaseException | None = None) -> None:
        """Go on together, or not at all.

        Returns where every rank came without an error. Where some did not, each of those raises its
        own, and the others PeerFailed, which names the first of them.
        """
        if self.world_size > 1:
            failed = self.rank if error is not None else self.world_size
            first = int(self.all_reduce_min(torch.tensor([failed])))
            if first < self.world_size:
                text = self._text_of(first, error)
                if error is None:
                    raise PeerFailed(first, text)
        if error is not None:
            raise error

    def _text_of(self, rank: int, error: BaseException | None) -> str:
        """What that rank says of its error."""
        said = f"{type(error).__name__}: {error}".encode(errors="replace")
        size = self.broadcast(torch.tensor([len(said)]), rank)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if rank == self.rank:
            data.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        return self.broadcast(data, rank).numpy().tobytes().decode()

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.world_size > 1:
            try:
                cast("Any", dist).all_reduce(tensor, op)
            except RuntimeError as error:
                self._lost(error)
        return tensor

    def _lost(self, error: BaseException) -> NoReturn:
        raise PeersLost(
            f"rank {self.rank} of {self.world_size} waited for the others in vain: {error}"
        ) from error


def _device(name: str) -> torch.device:
    """A name without a number means the first: an actor sees the GPUs that it was given."""
    return torch.device("cuda:0" if name == "cuda" else name)
