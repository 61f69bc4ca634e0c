"""Calls made together that fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


@asynccontextmanager
async def together() -> AsyncGenerator[asyncio.TaskGroup]:
    """A task group that raises what its first failed task raised, and not a group of it."""
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        failed = errors.exceptions[0]
    if failed is not None:
        raise failed
