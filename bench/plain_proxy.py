"""A plain aiohttp proxy, server and client, that passes everything on: `PORT ENGINE_URL`."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _main(port: int, engine: str) -> None:
    client = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    )

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with client.request(
            request.method, engine + request.path, data=body, headers=headers
        ) as answer:
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                whole = await answer.read()
                return web.Response(
                    status=answer.status, body=whole, headers={"content-type": kind}
                )
            response = web.StreamResponse(status=answer.status, headers={"content-type": kind})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), sys.argv[2]))
