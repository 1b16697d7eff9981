"""Which `transfer_queue` a process gets, and who it hands that on to."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from dataplane import compat

REAL = any(
    name.lower() == "transferqueue"
    for dist in importlib.metadata.distributions()
    for name in [dist.metadata["Name"] or ""]
)


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; without this session's path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_RUNTIME_ENV_HOOK")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WHERE = "import transfer_queue as tq; print(tq.__file__, tq.__version__)"


def test_activation_reaches_this_process_and_its_children() -> None:
    out = python(
        "from dataplane.compat import activate; activate(); activate()\n"
        f"{WHERE}\n"
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {WHERE!r}], check=True)\n"
    )
    mine, childs = out.splitlines()
    assert mine == childs
    assert mine == f"{compat.folder()}/transfer_queue/__init__.py 0.1.11+dataplane"


def test_the_printed_folder_on_the_path_does_the_same() -> None:
    folder = subprocess.run(
        [sys.executable, "-m", "dataplane.compat"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert folder == compat.folder()
    assert python(WHERE, PYTHONPATH=folder).startswith(folder)


def test_only_the_drop_in_lies_in_the_folder() -> None:
    there = {name for name in os.listdir(compat.folder()) if not name.startswith("__")}
    assert there == {"transfer_queue"}, "anything else could be imported by its bare name"


@pytest.mark.skipif(not REAL, reason="TransferQueue is not installed (extra `bench`)")
@pytest.mark.transferqueue
def test_activation_after_the_real_one_was_imported_is_refused() -> None:
    out = python(
        "import transfer_queue\n"
        "from dataplane.compat import activate\n"
        "try:\n"
        "    activate()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "transfer_queue was imported already" in out
    assert "before anything imports it" in out


def test_a_ray_job_s_environment_gains_the_path_and_keeps_the_rest() -> None:
    made = compat.with_path({"env_vars": {"PYTHONPATH": "/a:/b", "X": "1"}, "working_dir": "."})
    assert made == {
        "env_vars": {"PYTHONPATH": f"{compat.folder()}:/a:/b", "X": "1"},
        "working_dir": ".",
    }
    assert compat.with_path(made) == made
    assert compat.with_path(None)["env_vars"]["PYTHONPATH"].startswith(compat.folder())


def test_a_batch_is_unpickled_by_its_public_path_without_ray_or_a_plane() -> None:
    out = python(
        "import pickle, sys\n"
        "from transfer_queue import KVBatchMeta\n"
        "meta = KVBatchMeta(keys=['a'], tags=[{'n': 1}], partition_id='p', fields=['x'])\n"
        "again = pickle.loads(pickle.dumps(meta))\n"
        "print(again == meta, 'ray' in sys.modules)\n"
        "print(pickle.dumps(meta).count(b'transfer_queue'))\n",
        PYTHONPATH=compat.folder(),
    )
    same, count = out.splitlines()
    assert same == "True False"
    assert int(count) >= 1
