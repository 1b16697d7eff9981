"""What `import dataplane` offers is what it says it offers, and each name says what it does."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from collections.abc import Iterator

import dataplane
from tests.repo.tree import modules


def test_all_is_what_type_checkers_see() -> None:
    """Names load on first use, so the imports that checkers read are a second list."""
    seen = {i.name for i in modules()["dataplane"].imports if i.typing_only and i.name}
    assert seen - {"Any", "TYPE_CHECKING"} == set(dataplane.__all__)


def test_all_names_nothing_twice() -> None:
    assert len(dataplane.__all__) == len(set(dataplane.__all__))


def test_every_name_loads_and_belongs_here() -> None:
    for name in dataplane.__all__:
        value = getattr(dataplane, name)
        assert value.__module__.split(".")[0] == "dataplane", name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dataplane, "kv_frobnicate")


def _documented() -> Iterator[tuple[str, object]]:
    """Public functions, classes, and the public methods and properties of those classes."""
    for name in dataplane.__all__:
        value = getattr(dataplane, name)
        yield name, value
        for method, member in vars(value).items() if inspect.isclass(value) else ():
            kinds = types.FunctionType | property | staticmethod | classmethod
            if not method.startswith("_") and isinstance(member, kinds):
                # Through the class, so that an override inherits what it does not repeat.
                yield f"{name}.{method}", getattr(value, method)


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name, value in _documented() if not inspect.getdoc(value)] == []


def _arguments(cls: type) -> dict[str, list[tuple[str, object, object]]]:
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_sync_and_async_clients_have_the_same_verbs_and_arguments() -> None:
    assert _arguments(dataplane.Client) == _arguments(dataplane.AsyncClient)


def test_module_level_verbs_take_what_the_clients_take() -> None:
    of_client = _arguments(dataplane.Client)
    for name in (n for n in dataplane.__all__ if n.startswith("kv_")):
        parameters = inspect.signature(getattr(dataplane, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in parameters] == of_client[name][1:], name


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    """A server, and an outside producer, start in milliseconds and without either."""
    code = "import sys, dataplane; print({'torch', 'ray', 'tensordict'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "set()"
