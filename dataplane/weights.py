"""Weights on the data plane: a partition for each version, such as `weights@17`.

Owns its form. Each parameter is a row: its name is the key, and its numbers lie flat in a field
named by their dtype. The last row to be written is the manifest with names, shapes and dtypes; then
the partition is sealed, which drops the versions that are too old. A version is whole when it is
sealed and holds what its manifest says; nobody reads another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    FieldNotFound,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    WeightsNotFound,
)

if TYPE_CHECKING:
    import torch

    from dataplane.client.sync import Client

    Tensors: TypeAlias = Mapping[str, torch.Tensor]

MANIFEST: Final = "@manifest"
"""Key and field of the manifest; no parameter has this name."""

PUT_BYTES: Final = 256 << 20
"""Written at a time, a larger parameter aside."""
_PUT_ROWS: Final = 4096
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one policy version."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """By every name that a parameter has. They may lie in the store itself: WRITING TO ONE KILLS
    THIS PROCESS. Copy what is to be changed."""


def publish_weights(
    client: Client,
    weights: Any,
    version: int,
    *,
    prefix: str = "weights",
    keep: int = 2,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    timeout: float | None = None,
) -> int:
    """Write a version that readers find once it is whole; how many bytes it has.

    `weights` is a module, or a mapping of names to tensors on any device; tied parameters are
    written once. `dtype` converts floating-point ones. The `keep` newest versions stay; a view of
    an older one stays readable until it is closed. What an earlier try left of this version is
    dropped first. One process publishes at a time.

    With `replace` the run went back: this version and all later ones are dropped first.

    Raises:
        AlreadyWritten: there is this version or a later one, and not `replace`.
        InvalidRequest: there is nothing to publish, or a name that cannot be.
        DataplaneError: of the verb that failed; nothing is left of the version.
    """
    tensors, aliases = _distinct(weights)
    partition_id = f"{prefix}@{version}"
    partitions = client.kv_list_partitions(timeout=timeout)
    later = [v for v in _versions(partitions, prefix, sealed=True) if v >= version]
    if later and not replace:
        raise AlreadyWritten(
            f"{prefix!r} has version {later[-1]} already, and {version} would not be the newest; "
            f"publish with replace=True if the run went back",
            partition_id=partition_id,
        )
    for old in _versions(partitions, prefix, sealed=False):
        if old == version or (replace and old > version):
            client.kv_drop_partition(f"{prefix}@{old}", timeout=timeout)
    client.kv_create_partition(prefix, retention={"versions": keep}, timeout=timeout)
    try:
        parameters: list[tuple[str, str, list[int]]] = []
        total = 0
        for kind, names, flat in _chunks(tensors, dtype):
            client.kv_batch_put(names, partition_id, {kind: flat}, timeout=timeout)
            total += sum(tensor.nbytes for tensor in flat)
            parameters += [(name, kind, list(tensors[name].shape)) for name in names]
        manifest = {"parameters": parameters, "aliases": aliases}
        client.kv_put(
            MANIFEST, partition_id, {"manifest": manifest}, {"version": version}, timeout=timeout
        )
        client.kv_seal_partition(partition_id, timeout=timeout)
    except BaseException:
        try:
            client.kv_drop_partition(partition_id)
        except DataplaneError:
            pass  # it is not sealed, so nobody reads it, and the next try drops it
        raise
    _drop_leftovers(client, prefix, timeout)
    return total


def newest_version(
    client: Client, *, prefix: str = "weights", timeout: float | None = None
) -> int | None:
    """The newest version that is whole, if there is one."""
    found = _versions(client.kv_list_partitions(timeout=timeout), prefix, sealed=True)
    return found[-1] if found else None


@contextmanager
def read_weights(
    client: Client,
    version: int | None = None,
    *,
    prefix: str = "weights",
    timeout: float | None = None,
) -> Generator[Weights]:
    """A version's weights, None for the newest, for as long as the context is open.

    They are looked at in place where the store is on this node, and copied where it is not.

    Raises:
        WeightsNotFound: there is no such version, or it is not whole.
    """
    with ExitStack() as views:
        yield _read(client, version, prefix, timeout, views)


# -- writing ---------------------------------------------------------------------------------


def _distinct(weights: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once by its first name, and the other names of those that have several."""
    import torch

    named = weights.state_dict(keep_vars=True) if isinstance(weights, torch.nn.Module) else weights
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    known: dict[Any, str] = {}
    for name, value in cast("Mapping[str, torch.Tensor]", named).items():
        if name == MANIFEST or not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise InvalidRequest(f"{name!r} is no parameter: {type(value).__name__}")
        tensor = value.detach()
        same: Any = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = known.setdefault(same, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    if not tensors:
        raise InvalidRequest("there is no weight to publish")
    return tensors, aliases


def _chunks(
    tensors: Tensors, dtype: torch.dtype | None
) -> Iterator[tuple[str, list[str], list[torch.Tensor]]]:
    """(dtype, names, flat tensors in host memory) of each put."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        cast_to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        kinds.setdefault(cast_to, []).append(name)
    for kind, members in kinds.items():
        names: list[str] = []
        flat: list[torch.Tensor] = []
        size = 0
        for name in members:
            nbytes = tensors[name].numel() * kind.itemsize
            if names and (size + nbytes > PUT_BYTES or len(names) == _PUT_ROWS):
                yield _word(kind), names, flat
                names, flat, size = [], [], 0
            names.append(name)
            flat.append(tensors[name].to("cpu", kind).reshape(-1))
            size += nbytes
        yield _word(kind), names, flat


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drop_leftovers(client: Client, prefix: str, timeout: float | None) -> None:
    """Drop what publishers that died left behind among versions that nobody keeps."""
    partitions = client.kv_list_partitions(timeout=timeout)
    kept = _versions(partitions, prefix, sealed=True)
    if kept and _versions(partitions, prefix, sealed=False)[0] < kept[0]:
        client.kv_drop_partition(prefix, older_than=kept[0], timeout=timeout)


def _versions(
    partitions: Mapping[str, Mapping[str, Any]], prefix: str, *, sealed: bool
) -> list[int]:
    """Versions of a family in order; with `sealed`, only those that are whole."""
    return sorted(
        int(number)
        for name, about in partitions.items()
        for family, _, number in [name.rpartition("@")]
        if family == prefix and number.isascii() and number.isdigit() and str(int(number)) == number
        if about["sealed"] or not sealed
    )


# -- reading ---------------------------------------------------------------------------------


def _read(
    client: Client, version: int | None, prefix: str, timeout: float | None, views: ExitStack
) -> Weights:
    tries = 0
    while True:
        found = version
        if found is None:
            found = newest_version(client, prefix=prefix, timeout=timeout)
        if found is None:
            raise WeightsNotFound(f"no version of {prefix!r} has been published yet")
        try:
            return Weights(found, _tensors(client, f"{prefix}@{found}", timeout, views))
        except PartitionNotFound as error:
            # The newest may be dropped while it is read, when newer ones come fast.
            tries += 1
            if version is not None or tries == _TRIES:
                there = _versions(client.kv_list_partitions(timeout=timeout), prefix, sealed=True)
                raise WeightsNotFound(
                    f"{prefix!r} has no version {found}; it has {there}",
                    partition_id=f"{prefix}@{found}",
                ) from error


def _tensors(
    client: Client, partition_id: str, timeout: float | None, views: ExitStack
) -> dict[str, torch.Tensor]:
    try:
        rows = client.kv_batch_get(
            [MANIFEST], partition_id, ["manifest"], layout="list", timeout=timeout
        )
        manifest = rows["manifest"][0]
        kinds: dict[str, dict[str, list[int]]] = {}
        for name, kind, shape in manifest["parameters"]:
            kinds.setdefault(kind, {})[name] = shape
        flat = {
            kind: _look(client, partition_id, list(shapes), kind, timeout, views)
            for kind, shapes in kinds.items()
        }
    except PartitionNotFound:
        raise
    except (KeyNotFound, FieldNotFound) as error:
        raise WeightsNotFound(
            f"{partition_id} is not whole: {error}", partition_id=partition_id
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    for kind, shapes in kinds.items():
        for (name, shape), values in zip(shapes.items(), flat[kind], strict=True):
            try:
                tensors[name] = values.view(shape)
            except RuntimeError as error:
                raise WeightsNotFound(
                    f"{partition_id} is not whole: {name} has {values.numel()} numbers, and its "
                    f"manifest says {shape}",
                    partition_id=partition_id,
                ) from error
    return tensors | {alias: tensors[name] for alias, name in manifest["aliases"].items()}


def _look(
    client: Client,
    partition_id: str,
    names: list[str],
    kind: str,
    timeout: float | None,
    views: ExitStack,
) -> list[torch.Tensor]:
    """The flat rows, in place if that can be."""
    try:
        rows = views.enter_context(
            client.kv_view(names, partition_id, [kind], layout="list", timeout=timeout)
        )
    except InvalidRequest:  # they lie on another node
        rows = client.kv_batch_get(names, partition_id, [kind], layout="list", timeout=timeout)
    return list(rows[kind])
