"""Adapters of a replica: loaded once, kept while used, the oldest idle ones leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.sampling.vllm.adapters import ReplicaAdapters, adapter_name
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import RequestFailed
from tests.unit.vllm.fake_server import FakeServer, serving


@pytest_asyncio.fixture
async def fake() -> FakeServer:
    return FakeServer()


@pytest_asyncio.fixture
async def adapters(fake: FakeServer) -> AsyncIterator[ReplicaAdapters]:
    async with serving(fake) as url:
        client = ReplicaClient(url)
        yield ReplicaAdapters(client, capacity=2)
        await client.close()


async def use(adapters: ReplicaAdapters, *folders: str) -> None:
    for folder in folders:
        async with adapters.hold(folder) as name:
            assert name == adapter_name(folder)


async def settled(fake: FakeServer, count: int) -> None:
    while len(fake.log) < count:  # noqa: ASYNC110 - what leaves, leaves in the background
        await asyncio.sleep(0)


async def test_many_who_need_it_at_once_load_it_once(fake: FakeServer, adapters: ReplicaAdapters):
    await asyncio.gather(*(use(adapters, "x") for _ in range(20)))
    assert fake.log == [("load", "x")]


async def test_the_least_recently_used_leaves(fake: FakeServer, adapters: ReplicaAdapters):
    await use(adapters, "x", "y", "x", "z")
    await settled(fake, 4)
    assert [what for what in fake.log if what[0] == "unload"] == [("unload", "y")]
    assert adapters.folders == {"x", "z"}


async def test_none_leaves_while_it_is_used(fake: FakeServer, adapters: ReplicaAdapters):
    async with adapters.hold("a"), adapters.hold("b"), adapters.hold("c"):
        assert adapters.folders == {"a", "b", "c"}
    await use(adapters, "c")
    assert adapters.folders == {"b", "c"}


async def test_what_is_too_much_leaves_as_soon_as_nobody_uses_it(
    fake: FakeServer, adapters: ReplicaAdapters
):
    async with adapters.hold("a"), adapters.hold("b"), adapters.hold("c"), adapters.hold("d"):
        assert adapters.folders == {"a", "b", "c", "d"}
    assert adapters.folders == {"a", "b"}
    await settled(fake, 6)
    assert set(fake.loaded.values()) == {"a", "b"}


async def test_what_was_loaded_for_one_who_left_does_not_stay_beyond_the_capacity(
    fake: FakeServer, adapters: ReplicaAdapters
):
    async with adapters.hold("a"), adapters.hold("b"):
        fake.open.clear()
        leaving = asyncio.create_task(use(adapters, "c"))
        await settled(fake, 3)
        leaving.cancel()
        fake.open.set()
        await settled(fake, 4)
        assert fake.log[-1] == ("unload", "c")


async def test_what_has_just_left_can_come_back_at_once(
    fake: FakeServer, adapters: ReplicaAdapters
):
    for _ in range(10):
        await use(adapters, "x", "y", "z")
    await settled(fake, 58)
    assert set(fake.loaded.values()) == adapters.folders


async def test_one_who_gives_up_does_not_stop_the_loading_for_the_rest(
    fake: FakeServer, adapters: ReplicaAdapters
):
    fake.open.clear()
    first, second = (asyncio.create_task(use(adapters, "x")) for _ in range(2))
    await settled(fake, 1)
    first.cancel()
    fake.open.set()
    await second
    assert fake.log == [("load", "x")]


async def test_a_folder_that_is_refused_is_tried_again_for_the_next_request(
    fake: FakeServer, adapters: ReplicaAdapters
):
    for count in (1, 2):
        with pytest.raises(RequestFailed, match="bad cannot be loaded: LoRA rank 64"):
            await use(adapters, "bad")
        assert len(fake.log) == count
    assert adapters.folders == frozenset()


async def test_an_adapter_that_somebody_else_loaded_there_is_used(
    fake: FakeServer, adapters: ReplicaAdapters
):
    fake.loaded[adapter_name("x")] = "x"
    await use(adapters, "x")


async def test_those_that_use_an_older_one_follow_it_through_every_newer_one(
    fake: FakeServer, adapters: ReplicaAdapters
):
    async with adapters.hold("v1") as first:
        assert adapters.replace("v1", "v2") == [first]
        async with adapters.hold("v1") as second:
            assert second == adapter_name("v2")
            assert adapters.replace("v2", "v3") == [first, second]
    assert adapters.folders == frozenset()


async def test_one_that_nobody_uses_is_not_replaced_but_left(
    fake: FakeServer, adapters: ReplicaAdapters
):
    await use(adapters, "v1")
    assert adapters.replace("v1", "v2") == []
    assert adapters.folders == frozenset()
    assert adapters.replace("never held", "v2") == []
