"""Group commit: many writers share a disk flush, and each succeeds or fails alone."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from server.store.database import Database


class Commits:
    """Counts the commits of the writer, and makes one fail when asked."""

    def __init__(self, db: Database) -> None:
        self.count = 0
        self.fail_next = False
        event.listen(db._writing.sync_engine, "commit", self._on_commit)

    def _on_commit(self, _: Any) -> None:
        if self.fail_next:
            self.fail_next = False
            raise OperationalError("COMMIT", {}, sqlite3.OperationalError("disk full"))
        self.count += 1


@pytest.fixture
async def words(db: Database) -> Database:
    await db.write(lambda s: s.execute(text("CREATE TABLE words (word TEXT PRIMARY KEY)")))
    return db


async def put(session: AsyncSession, word: str) -> str:
    await session.execute(text("INSERT INTO words VALUES (:word)"), {"word": word})
    return word


async def all_words(db: Database) -> set[str]:
    return set(await db.read(lambda s: s.scalars(text("SELECT word FROM words"))))


async def test_many_writers_share_few_commits(words: Database):
    commits = Commits(words)
    written = await asyncio.gather(
        *(words.write(lambda s, n=n: put(s, str(n))) for n in range(200))
    )

    assert written == [str(n) for n in range(200)]
    assert await all_words(words) == set(written)
    assert commits.count <= 2


async def test_a_write_is_on_disk_when_it_returns(words: Database):
    await words.write(lambda s: put(s, "here"))

    path = words.engine.url.database
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT word FROM words").fetchall() == [("here",)]
    other.close()


async def test_a_unit_that_fails_fails_alone_and_leaves_nothing(words: Database):
    async def broken(session: AsyncSession) -> None:
        await put(session, "half")
        raise ValueError("no")

    results = await asyncio.gather(
        words.write(lambda s: put(s, "before")),
        words.write(broken),
        words.write(lambda s: put(s, "before")),
        words.write(lambda s: put(s, "after")),
        return_exceptions=True,
    )

    assert results[0] == "before"
    assert isinstance(results[1], ValueError)
    assert isinstance(results[2], IntegrityError)
    assert results[3] == "after"
    assert await all_words(words) == {"before", "after"}


async def test_a_failed_commit_fails_its_group_and_no_other(words: Database):
    commits = Commits(words)
    commits.fail_next = True
    results = await asyncio.gather(
        *(words.write(lambda s, n=n: put(s, f"lost-{n}")) for n in range(3)),
        return_exceptions=True,
    )
    assert all(isinstance(result, OperationalError) for result in results)

    assert await words.write(lambda s: put(s, "kept")) == "kept"
    assert await all_words(words) == {"kept"}


async def test_a_writer_that_goes_away_undoes_nothing(words: Database):
    first = asyncio.create_task(words.write(lambda s: put(s, "first")))
    second = asyncio.create_task(words.write(lambda s: put(s, "second")))
    await asyncio.sleep(0)
    first.cancel()

    assert await second == "second"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await all_words(words) == {"first", "second"}


async def test_readers_do_not_wait_for_a_writer_and_see_no_half(words: Database):
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(session: AsyncSession) -> None:
        await put(session, "later")
        entered.set()
        await go_on.wait()

    writing = asyncio.create_task(words.write(slow))
    await entered.wait()
    assert await all_words(words) == set()
    go_on.set()
    await writing
    assert await all_words(words) == {"later"}


async def test_a_write_of_another_process_is_waited_for(words: Database):
    """`hearth keys create` writes to the same file: taking the lock after a first read would
    fail at once, whatever the timeout."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def read_then_write(session: AsyncSession) -> None:
        await session.execute(text("SELECT * FROM words"))
        entered.set()
        await go_on.wait()
        await put(session, "ours")

    async def other_process() -> None:
        await entered.wait()
        other = await asyncio.to_thread(
            sqlite3.connect, words.engine.url.database, timeout=5, check_same_thread=False
        )
        writing = asyncio.create_task(
            asyncio.to_thread(other.execute, "INSERT INTO words VALUES ('theirs')")
        )
        await asyncio.sleep(0.05)
        go_on.set()
        await writing
        other.commit()
        other.close()

    await asyncio.gather(words.write(read_then_write), other_process())
    assert await all_words(words) == {"ours", "theirs"}


async def test_stopping_writes_what_was_asked_for(words: Database):
    asked = [asyncio.create_task(words.write(lambda s, n=n: put(s, str(n)))) for n in range(3)]
    await asyncio.sleep(0)
    await words.stop()
    assert await asyncio.gather(*asked) == ["0", "1", "2"]
