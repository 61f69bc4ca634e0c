"""A ring is never missed by who listened before, and nothing is kept for who left."""

from __future__ import annotations

import asyncio

from server.store.bell import Bell


async def test_a_ring_before_the_wait_is_heard():
    bell: Bell[str] = Bell()
    with bell.listen("key") as ring:
        bell.ring("key")
        assert await ring.within(0)
        assert await ring.within(10)


async def test_a_ring_wakes_all_who_listen_to_that_key_only():
    bell: Bell[str] = Bell()

    async def listen(key: str) -> bool:
        with bell.listen(key) as ring:
            return await ring.within(0.05)

    listening = [asyncio.create_task(listen(key)) for key in ("a", "a", "b")]
    await asyncio.sleep(0)
    bell.ring("a")
    assert await asyncio.gather(*listening) == [True, True, False]


async def test_who_listens_after_a_ring_waits_for_the_next():
    bell: Bell[str] = Bell()
    with bell.listen("key") as first:
        bell.ring("key")
        with bell.listen("key") as second:
            assert await first.within(0)
            assert not await second.within(0.001)
            bell.ring("key")
            assert await second.within(0)


async def test_nothing_is_kept_when_nobody_listens():
    bell: Bell[str] = Bell()
    with bell.listen("a"), bell.listen("a"), bell.listen("b"):
        bell.ring("b")
    bell.ring("nobody")
    bell.ring_all()
    assert not bell._rings
