"""A headless browser with the network cut off, and what it says of a page.

`page_in(address, path)` loads a file and answers with what was asked for, logged and laid out. The
browser is driven by its own protocol over a websocket.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FOLDER = Path(__file__).resolve().parents[3] / ".browser"
ARGUMENTS = (
    "--headless=shell --no-sandbox --no-zygote --disable-gpu --disable-dev-shm-usage "
    "--disable-breakpad --no-first-run --disable-background-networking --disable-component-update "
    "--use-mock-keychain --password-store=basic --hide-scrollbars --font-render-hinting=none "
    # Whatever is asked of any host goes to a port where nobody listens.
    "--proxy-server=127.0.0.1:9 --proxy-bypass-list=<-loopback> --remote-debugging-port=0"
).split()
START_S = 60.0
ANSWER_S = 60.0

LAYOUT = """
(() => {
  const box = (e) => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const overlaps = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim());
    const boxes = texts.map(box), whole = box(svg);
    const chart = svg.querySelector("title").textContent;
    texts.forEach((text, i) => {
      const [l, t, r, b] = boxes[i];
      if (l < whole[0] - 1 || r > whole[2] + 1 || t < whole[1] - 1 || b > whole[3] + 1)
        overlaps.push(["outside of its chart", text.textContent, chart]);
      for (let j = 0; j < i; j++) {
        const [l2, t2, r2, b2] = boxes[j];
        if (Math.min(r, r2) - Math.max(l, l2) > 0.5 && Math.min(b, b2) - Math.max(t, t2) > 2)
          overlaps.push([texts[j].textContent, text.textContent, chart]);
      }
    });
  }
  const sections = [...document.querySelectorAll("section")].map((s) => {
    const [l, t, r, b] = box(s);
    return [s.querySelector("h2").textContent, r - l, b - t];
  });
  return JSON.stringify({
    overlaps, sections, title: document.title, text: document.body.innerText,
    scripts: document.scripts.length, elements: document.querySelectorAll("*").length,
    wide: document.documentElement.scrollWidth, seen: document.documentElement.clientWidth,
    tall: document.documentElement.scrollHeight,
    paper: getComputedStyle(document.body).backgroundColor,
    ids: [...document.querySelectorAll("[onload],[onerror],[onclick],iframe,img,a")].length,
  });
})()
"""


@dataclass
class Seen:
    """What a browser saw of a page."""

    layout: dict[str, Any]
    requests: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    picture: bytes = b""


def browser_command() -> Path:
    """The browser. The test is skipped where `make` could get none."""
    command = FOLDER / "chromium"
    if not (FOLDER / ".installed").exists() or not command.exists():
        pytest.skip("no browser in .browser: `make .browser/.installed` gets one by npm")
    return command


@asynccontextmanager
async def browser() -> AsyncIterator[str]:
    """A browser; the address by which it is driven."""
    command = browser_command()
    with tempfile.TemporaryDirectory(prefix="dataplane-browser-") as profile:
        environment = {
            "HOME": profile, "TMPDIR": profile, "PATH": os.environ.get("PATH", ""),
            "LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf"),
            "LANG": "C.UTF-8",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            str(command), *ARGUMENTS, f"--user-data-dir={profile}", "about:blank",
            env=environment, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        said: list[str] = []
        try:
            address = ""
            while not address:
                line = await asyncio.wait_for(process.stderr.readline(), START_S)
                assert line, f"the browser ended: {said}"
                said.append(line.decode(errors="replace"))
                _, found, address = said[-1].partition("DevTools listening on ")
                address = address.strip() if found else ""
            drain = asyncio.create_task(process.stderr.read())
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await drain


async def page_in(
    address: str, path: Path, *, width: int, scheme: str = "light", picture: bool = False
) -> Seen:
    """Load a page in a tab of its own, and look at it."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=1 << 28) as socket,
    ):
        tab = _Tab(socket)
        made = await tab.ask("Target.createTarget", url="about:blank")
        attached = await tab.ask("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        tab.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            await tab.ask(f"{domain}.enable")
        await tab.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        await tab.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await tab.ask("Page.navigate", url=path.as_uri())
        await tab.until("Page.loadEventFired")
        found = await tab.ask("Runtime.evaluate", expression=LAYOUT)
        assert "value" in found["result"], found
        seen = Seen(json.loads(found["result"]["value"]))
        if picture:
            clip = {"x": 0, "y": 0, "width": width, "height": seen.layout["tall"], "scale": 1}
            shot = await tab.ask(
                "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
            )
            seen.picture = base64.b64decode(shot["data"])
        for event in tab.events:
            told = event.get("params", {})
            if event["method"] == "Network.requestWillBeSent":
                seen.requests.append(told["request"]["url"])
            elif event["method"] == "Log.entryAdded":
                seen.complaints.append(told["entry"]["text"])
            elif event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                seen.complaints.append(json.dumps(told))
        await tab.ask("Target.closeTarget", targetId=made["targetId"])
        return seen


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        self._socket = socket
        self._number = 0

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session is not None and not method.startswith("Target."):
            message["sessionId"] = self.session
        await self._socket.send_json(message)
        while True:
            told = await self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    async def until(self, method: str) -> None:
        """Wait for an event."""
        while not any(event["method"] == method for event in self.events):
            await self._next()

    async def _next(self) -> dict[str, Any]:
        told: dict[str, Any] = await asyncio.wait_for(self._socket.receive_json(), ANSWER_S)
        if "method" in told:
            self.events.append(told)
        return told
