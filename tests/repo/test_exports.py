"""What `import dataplane` offers is what it says it offers, and each name says what it does."""

from __future__ import annotations

import inspect
import types

import pytest

from tests.repo.tree import ROOT

if not (ROOT / "dataplane/__init__.py").exists():
    pytest.skip("dataplane has no public face yet", allow_module_level=True)

import dataplane


def test_all_names_what_there_is() -> None:
    there_is = {
        name
        for name in dir(dataplane)
        if not name.startswith("_")
        and name != "annotations"
        # Submodules become attributes when they are imported; only listed ones are public.
        and not isinstance(getattr(dataplane, name), types.ModuleType)
    }
    named = {n for n in dataplane.__all__ if not n.startswith("_")}
    modules = {n for n in named if isinstance(getattr(dataplane, n), types.ModuleType)}
    assert there_is == named - modules


def test_all_names_nothing_twice() -> None:
    assert len(dataplane.__all__) == len(set(dataplane.__all__))


def _documented() -> list[str]:
    """Public functions, classes and the public methods of those classes."""
    found: list[str] = []
    for name in dataplane.__all__:
        value = getattr(dataplane, name)
        if inspect.isclass(value):
            found.append(name)
            found += [
                f"{name}.{method}"
                for method, member in vars(value).items()
                if not method.startswith("_")
                and isinstance(member, types.FunctionType | property | staticmethod | classmethod)
            ]
        elif callable(value):
            found.append(name)
    return found


@pytest.mark.parametrize("name", _documented())
def test_every_public_name_has_a_docstring(name: str) -> None:
    value: object = dataplane
    for part in name.split("."):
        value = inspect.getattr_static(value, part) if "." in name else getattr(value, part)
    assert inspect.getdoc(value)


def test_the_sync_and_async_clients_have_the_same_verbs_and_arguments() -> None:
    def verbs(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert verbs(dataplane.Client) == verbs(dataplane.AsyncClient)
