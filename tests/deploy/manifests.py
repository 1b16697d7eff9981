"""What lies in deploy/, read as strictly as its readers do: YAML without doubled keys, kustomize's
output, containers of any object, and commands as the programs that they name take them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.repo.tree import ROOT

DEPLOY = ROOT / "deploy"
IN_IMAGE = "/opt/rl-dataplane/examples"
"""Where the image has deploy/examples."""

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 1000, "m": 1 << 20, "g": 1 << 30}


class _Strict(yaml.SafeLoader):
    """Refuses a mapping that says a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        assert not twice, f"{node.start_mark}: twice: {twice}"
        return super().construct_mapping(node, deep)


def documents(text: str) -> list[Any]:
    """All documents of a YAML text."""
    return list(yaml.load_all(text, Loader=_Strict))


def built(folder: Path) -> list[dict[str, Any]]:
    """What kustomize makes of a folder."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is here")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def size(text: str | int) -> int:
    """A quantity of memory in bytes."""
    text = str(text)
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def pod_templates(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod template, by a name for it."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "RayCluster":
            yield "head", spec["headGroupSpec"]["template"]
            for group in spec.get("workerGroupSpecs", []):
                yield group["groupName"], group["template"]
        elif each["kind"] == "RayJob":
            yield "submitter", spec["submitterPodTemplate"]
        elif "template" in spec:
            yield each["metadata"]["name"], spec["template"]


def words(command: str | Sequence[str]) -> list[str]:
    """The words of the program that a command runs in the end: `sh -c 'exec …'` is seen through."""
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    if parts[:2] == ["sh", "-c"]:
        script = parts[2].replace("$$(", "$(")
        found = shlex.split(script)
        return found[1:] if found[0] == "exec" else found
    return parts


def check_command(parts: Sequence[str]) -> None:
    """AssertionError or SystemExit unless its program takes this command as it is written."""
    program, *rest = parts
    program = Path(program).name
    if program == "dataplane":
        from dataplane.cli.main import app

        _check_typer(app, rest)
    elif program == "trainer":
        from trainer.run import app as trainer_app
        from trainer.run import load_dotted

        _check_typer(trainer_app, rest)
        from trainer.config import load_settings

        file = Path(rest[1].replace(IN_IMAGE, str(DEPLOY / "examples")))
        given = [rest[i + 1] for i, word in enumerate(rest) if word == "--set"]
        settings = load_settings(file, given, resolve=load_dotted)
        _check_plane(settings.plane.settings)
        worker = settings.rollout_settings().get("workers", {}).get("plane")
        if worker:
            _check_plane(worker["settings"])
    else:
        raise AssertionError(f"nobody knows how to check {program!r}")


def _check_typer(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Parse without running, as deep as the commands go."""
    command: Any = typer.main.get_command(app)
    given = list(arguments)
    context: Any = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, given, parent=context)
        rest = [*context._protected_args, *context.args]
        _, command, given = command.resolve_command(context, rest)
    command.make_context(command.name, given, parent=context)


def _check_plane(settings: Any) -> None:
    from dataplane.config import Config

    Config(**settings)


def check_setting(name: str) -> None:
    """AssertionError unless a variable of the environment is a setting of a plane or a gateway."""
    from dataplane.config import Config
    from dataplane.gateway.config import GatewayConfig

    known = {f"DATAPLANE_{field}".upper() for field in Config.model_fields}
    known |= {f"DATAPLANE_GATEWAY_{field}".upper() for field in GatewayConfig.model_fields}
    known |= {"DATAPLANE_ADDRESS", "DATAPLANE_NAME"}
    assert name in known, f"{name} is no setting"
