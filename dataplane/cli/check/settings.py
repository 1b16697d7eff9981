"""The settings of planes and gateways as data: name, variable, unit, default, what it says.

Owns how they are read off the classes that declare them, so that nothing is said twice. Where
several settings share one text, it stands under the last of them.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

UNITS: Final[Mapping[str, str]] = {"_s": "seconds", "_bytes": "bytes"}
"""Endings of names that carry a unit."""

SHELL: Final = {
    "DATAPLANE_ADDRESS": "Where the plane is: its unix socket, or a gateway.",
    "DATAPLANE_NAME": "The plane's name.",
}
"""Variables that commands read besides those of settings."""


class Setting(NamedTuple):
    """One setting and what it is now."""

    name: str
    variable: str
    """The variable of the environment that sets it."""
    type: str
    unit: str
    default: Any
    value: Any
    source: str
    """`environment` or `default`."""
    doc: str


def settings_of(
    kind: type[BaseSettings], environment: Mapping[str, str], of: BaseSettings
) -> list[Setting]:
    """Every setting of a class, with its value in `of`."""
    docs = _docs(kind)
    prefix = kind.model_config.get("env_prefix", "")
    given = {name.upper() for name in environment}
    settings: list[Setting] = []
    for name, field in kind.model_fields.items():
        variable = f"{prefix}{name}".upper()
        unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
        settings.append(
            Setting(
                name,
                variable,
                _type_text(field.annotation),
                unit,
                plain(field.get_default(call_default_factory=True)),
                plain(getattr(of, name)),
                "environment" if variable in given else "default",
                docs.get(name, ""),
            )
        )
    return settings


def unknown_variables(environment: Mapping[str, str], known: set[str]) -> list[str]:
    """Variables that look like settings and are none: nothing reads them."""
    return sorted(
        name
        for name in environment
        if name.upper().startswith("DATAPLANE_") and name.upper() not in known
    )


def plain(value: Any) -> Any:
    """The value as JSON has it, without anything secret."""
    from dataplane.gateway.access.redaction import redact

    if isinstance(value, Path | str):
        return redact(os.fspath(value))
    if isinstance(value, tuple | list):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return {name: plain(item) for name, item in dump(mode="json").items()}
    return value


def _type_text(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("pathlib.", "").replace("NoneType", "None")


def _docs(kind: type[BaseSettings]) -> dict[str, str]:
    """The text under each setting in the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    docs: dict[str, str] = {}
    pending: list[str] = []
    for names, text in _statements(tree.body[0]):
        if text is None:
            pending += names
        else:
            docs.update(dict.fromkeys(pending, text))
            pending = []
    return docs


def _statements(cls: ast.stmt) -> Iterator[tuple[list[str], str | None]]:
    assert isinstance(cls, ast.ClassDef)
    for statement in cls.body[1:]:  # the first is the class's own text
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield [statement.target.id], None
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield [], " ".join(str(statement.value.value).split())
