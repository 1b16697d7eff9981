"""Code that settings name: loops, tools, environments, rewards, engines."""

from __future__ import annotations

import importlib
from typing import Any


def load(dotted: str) -> Any:
    """What `package.module:name`, or `package.module.name`, stands for.

    Raises:
        ValueError: nothing; the message says what is missing.
    """
    module_name, colon, path = dotted.partition(":")
    if not colon:
        module_name, _, path = dotted.rpartition(".")
    if not module_name or not path:
        raise ValueError(f"{dotted!r} is no dotted name; write package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{dotted!r}: {module_name} cannot be imported: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"{dotted!r}: {getattr(found, '__name__', found)} has no {name!r}")
        found = getattr(found, name)
    return found
