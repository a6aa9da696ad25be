"""A headless Chromium for tests, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_S = 60.0
CALL_S = 30.0
POLL_S = 0.05


def find_chromium() -> str | None:
    """The browser of this machine; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab; made by `open_page`, which closes it. Every call has a deadline."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """What scripts raised and the console called an error."""

    async def read(self) -> None:
        """Take answers and events until the socket closes."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(data["params"]["exceptionDetails"])[:2000])
            elif data["method"] == "Log.entryAdded":
                entry = data["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises AssertionError with what the browser says."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_S):
            data = await answer
        assert "error" not in data, f"{method}: {data['error']}"
        return dict(data["result"])

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Of an expression in the page, as JSON. Raises AssertionError with what it raised."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, timeout_s: float = 30.0) -> Any:
        """The first true value of an expression. Raises AssertionError with the page's text."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (found := await self.value(script)):
            if loop.time() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(
                    f"waited {timeout_s} s for {script}; errors: {self.errors}; {text}"
                )
            await asyncio.sleep(POLL_S)
        return found

    async def texts(self, selector: str) -> list[str]:
        """Of all elements that match."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        texts: list[str] = await self.value(f"{found}.map(e => e.textContent.trim())")
        return texts

    async def press(self, key: str, code: int) -> None:
        """One key, by its name and its number on a PC's keyboard."""
        text = "\r" if key == "Enter" else None
        fields = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def look(
        self, width: int, height: int, *, scheme: str = "light", scale: float = 1.0
    ) -> None:
        """As a window of that size in CSS pixels; `scheme`: `light` or `dark`."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def violations(self) -> list[str]:
        """Of accessibility rules, as axe-core finds them on the page as it is. Needs
        axe-core-python.
        """
        if not await self.value("typeof axe === 'object'"):
            await self.value(f"{_axe()};1")
        found: list[str] = await self.value(
            "axe.run(document).then(r => r.violations.map("
            "v => `${v.id}: ${v.help}: ${v.nodes.map(n => n.html.slice(0, 160)).join(' ')}`))"
        )
        return found


@asynccontextmanager
async def open_page(chromium: str) -> AsyncIterator[Page]:
    """A browser with one tab and a profile of its own; both are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="prfaas-chromium-", ignore_cleanup_errors=True) as name:
        process = await asyncio.create_subprocess_exec(
            chromium,
            *FLAGS,
            f"--user-data-dir={name}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(name), process)
            async with (
                aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
                session.ws_connect(await _tab(session), max_msg_size=0) as socket,
            ):
                page = Page(socket)
                reader = asyncio.create_task(page.read())
                try:
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _axe() -> str:
    return (resources.files("axe_core_python") / "axe.min.js").read_text()


async def _port(profile: Path, process: asyncio.subprocess.Process) -> int:
    """Where it listens. Raises AssertionError where it does not start."""
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while not (file.exists() and len(lines := file.read_text().split()) == 2):
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            await asyncio.sleep(POLL_S)
    return int(lines[0])


async def _tab(session: aiohttp.ClientSession) -> str:
    """The path of its socket."""
    async with asyncio.timeout(START_S):
        while True:
            async with session.get("/json/list") as response:
                tabs: list[Mapping[str, str]] = await response.json(content_type=None)
            for tab in tabs:
                if tab["type"] == "page":
                    return "/" + tab["webSocketDebuggerUrl"].split("/", 3)[3]
            await asyncio.sleep(POLL_S)
