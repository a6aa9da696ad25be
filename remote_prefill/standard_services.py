"""gRPC health checking and reflection, as the standard tools expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

CHECK_S = 0.1


class HealthReporter:
    """Serves health of one service; follows `is_serving` from `start` to `stop`."""

    def __init__(
        self, server: grpc.aio.Server, service: str, is_serving: Callable[[], bool]
    ) -> None:
        self._servicer = health.aio.HealthServicer()
        self._service = service
        self._is_serving = is_serving
        self._task: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        await self._report()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await self._report()

    async def _report(self) -> None:
        """The empty name stands for the whole server, as the protocol says."""
        serving = self._is_serving()
        status = health_pb2.HealthCheckResponse.SERVING
        if not serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", self._service):
            await self._servicer.set(service, status)


def add_reflection(server: grpc.aio.Server, *services: str) -> None:
    """Let tools list and describe the services."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
