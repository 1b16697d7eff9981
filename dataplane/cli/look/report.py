"""`dataplane report`: one page about a run, a plane, or both, for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.errors import InvalidRequest


def report(
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Folder of a run: its metrics, and what its plane knew at its end.",
            file_okay=False,
            metavar="FOLDER",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where to write it; report.html in the run's folder, or here, if not set.",
            dir_okay=False,
            metavar="FILE",
        ),
    ] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write one HTML page about a run and its plane; it needs no network.

    Without --run it is about the plane that is there now. With --run and --address, --name or --ray
    it is about a run that still goes on.

    Example: dataplane report --out report.html
    """
    from dataplane.report.write import write_report

    if out is None:
        out = Path("report.html") if run is None else run / "report.html"
    plane = None
    if run is not None and not run.is_dir():
        raise InvalidRequest(f"there is no run folder {str(run)!r}")
    if run is None or not (address is None and name is None and ray is None):
        with reached(address, name, ray, timeout) as client:
            plane = client.record()
    typer.echo(str(write_report(out, run=run, plane=plane)))
