"""What no file of the repository may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, modules, under

SKIPPED = {".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache", "build", "dist"}

UNSAFE_CALLS = {
    "eval",
    "exec",
    "pickle.loads",
    "pickle.load",
    "pickle.Unpickler",
    "cloudpickle.loads",
    "cloudpickle.load",
    "marshal.loads",
    "yaml.load",
    "yaml.unsafe_load",
}


def _files() -> list[Path]:
    """Text files that a commit would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not SKIPPED & set(p.relative_to(ROOT).parts)]
    suffixes = {".png", ".jpg", ".pdf", ".bin"}
    return [p for p in paths if p.is_file() and p.suffix not in suffixes]


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_received_is_unpickled_or_evaluated() -> None:
    wrong = [
        f"{module.where}:{node.lineno}: {ast.unparse(node.func)}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in UNSAFE_CALLS or _loads_more_than_weights(node)
    ]
    assert not wrong, "\n".join(wrong)


def _loads_more_than_weights(call: ast.Call) -> bool:
    """`torch.load` unpickles, unless it is told in so many words to read tensors alone."""
    if ast.unparse(call.func) != "torch.load":
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    limit = given.get("weights_only")
    return not (isinstance(limit, ast.Constant) and limit.value is True)


@pytest.mark.parametrize(
    ("call", "unsafe"),
    [
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=limit)", True),
        ("torch.load(f, weights_only=True)", False),
        ("json.load(f)", False),
    ],
)
def test_which_loads_are_taken_for_unsafe(call: str, unsafe: bool) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert _loads_more_than_weights(node) is unsafe


def test_the_dataplane_does_not_import_pickle() -> None:
    wrong = [
        f"{module.where}:{found.line}"
        for module in modules().values()
        if under(module.name, "dataplane")
        for found in module.imports
        if found.module.split(".")[0] in ("pickle", "cloudpickle", "marshal", "shelve", "dill")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_place_on_one_machine() -> None:
    # Below /home/ray lie the files of Ray's own container images.
    wrong = _lines_with(re.compile(r"(?<![\w.$}~-])/(?:work|root|Users|home/(?!ray\b)\w+)/"))
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_package_registry() -> None:
    wrong = _lines_with(
        re.compile(r"pypi\.org|pythonhosted|registry\.npmjs|deb\.debian\.org|--index-url")
    )
    assert not wrong, "\n".join(wrong)


def test_no_file_holds_a_merge_marker() -> None:
    wrong = _lines_with(re.compile(r"^(?:<{7}|>{7}) "))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(modules()))
def test_every_module_says_what_it_owns(name: str) -> None:
    module = modules()[name]
    if not module.tree.body:
        pytest.skip("an empty file owns nothing")
    assert ast.get_docstring(module.tree)
