"""The part of msgpack that this repository uses; the package ships no types."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
from _typeshed import ReadableBuffer

# Numpy's arrays are buffers, which their own types say from Python 3.12 on.
_Packed = ReadableBuffer | npt.NDArray[Any]

class ExtType(NamedTuple):
    code: int
    data: bytes

class Timestamp:
    def __init__(self, seconds: int, nanoseconds: int = 0) -> None: ...

class Packer:
    def __init__(
        self,
        *,
        default: Callable[[Any], object] | None = None,
        use_single_float: bool = False,
        autoreset: bool = True,
        use_bin_type: bool = True,
        strict_types: bool = False,
    ) -> None: ...
    def pack(self, obj: object) -> bytes: ...
    def bytes(self) -> bytes: ...
    def reset(self) -> None: ...

class Unpacker:
    def __init__(
        self,
        file_like: None = None,
        *,
        use_list: bool = True,
        raw: bool = False,
        strict_map_key: bool = True,
        ext_hook: Callable[[int, bytes], object] = ...,
        max_buffer_size: int = ...,
        max_bin_len: int = -1,
        max_ext_len: int = -1,
    ) -> None: ...
    def feed(self, next_bytes: _Packed) -> None: ...
    def unpack(self) -> Any: ...
    def tell(self) -> int: ...

def packb(
    o: object,
    *,
    default: Callable[[Any], object] | None = None,
    use_single_float: bool = False,
    use_bin_type: bool = True,
    strict_types: bool = False,
) -> bytes: ...
def unpackb(
    packed: _Packed,
    *,
    use_list: bool = True,
    raw: bool = False,
    strict_map_key: bool = True,
    ext_hook: Callable[[int, bytes], object] = ...,
    list_hook: Callable[[list[Any]], object] | None = None,
    max_bin_len: int = -1,
    max_ext_len: int = -1,
) -> Any: ...
