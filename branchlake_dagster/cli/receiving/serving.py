"""The simulated pages over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from branchlake_dagster.extras import require
from branchlake_dagster.sda.feeds.network import Pages


@asynccontextmanager
async def served(pages: Pages, host: str, port: int) -> AsyncIterator[str]:
    """``GET /observations`` while the block runs; its URL. Port 0 takes a free one."""
    require("receive", "aiohttp", wanted_by="A server of pages")
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        found = await pages.answer(request.query)
        headers = {} if found.retry_after_s is None else {"Retry-After": str(found.retry_after_s)}
        kind = "application/json" if found.status == 200 else "text/plain"
        return web.Response(status=found.status, body=found.body, headers=headers, content_type=kind)

    app = web.Application()
    app.add_routes([web.get("/observations", answer)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}/observations"
    finally:
        await runner.cleanup()
