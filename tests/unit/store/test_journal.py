"""What the journal is asked: what to repeat, what to prune, how far a run is."""

from __future__ import annotations

from server.core.requests import Kind
from server.store import journal
from server.store.ledger import Ledger, Outcome
from tests.databases import Clock
from tests.unit.store.material import RUN, request

DONE = Outcome(result=b"result", result_type="application/json")
FAILED = Outcome(error="no", error_category="user")


async def finished(ledger: Ledger, seq: int, kind: Kind, outcome: Outcome = DONE) -> None:
    stored, _ = await ledger.submit(request(seq, kind))
    await ledger.finish(stored, outcome)


async def payloads(ledger: Ledger) -> dict[int, bytes | None]:
    found = {}
    for seq in range(10):
        one = await ledger.db.read(lambda s, seq=seq: journal.find(s, f"{RUN}:{seq}"))
        if one is not None:
            found[seq] = one.payload
    return found


async def test_what_is_repeated_is_what_changed_the_run_in_its_order(ledger: Ledger):
    await finished(ledger, 5, Kind.OPTIM_STEP)
    await finished(ledger, 3, Kind.FORWARD_BACKWARD)
    await finished(ledger, 4, Kind.FORWARD_BACKWARD, FAILED)
    await finished(ledger, 2, Kind.FORWARD)
    await finished(ledger, 1, Kind.FORWARD_BACKWARD)
    await finished(ledger, 6, Kind.SAVE)
    await ledger.submit(request(7))

    found = await ledger.db.read(lambda s: journal.replayable(s, RUN, 1))
    assert [one.seq for one in found] == [3, 5]
    assert all(one.payload == b"body" for one in found)


async def test_progress_is_the_last_done_and_the_failed_beyond_it(ledger: Ledger):
    assert await ledger.db.read(lambda s: journal.progress(s, RUN)) == (-1, [])
    await finished(ledger, 1, Kind.FORWARD_BACKWARD, FAILED)
    await finished(ledger, 2, Kind.OPTIM_STEP)
    await ledger.submit(request(3))
    await finished(ledger, 5, Kind.FORWARD_BACKWARD, FAILED)

    assert await ledger.db.read(lambda s: journal.progress(s, RUN)) == (2, [5])


async def test_pruning_spares_what_waits_and_what_is_after(ledger: Ledger):
    for seq in (1, 3, 4):
        await finished(ledger, seq, Kind.FORWARD_BACKWARD)
    await ledger.submit(request(2))
    await ledger.db.write(lambda s: journal.prune_payloads(s, RUN, 3))

    assert await payloads(ledger) == {1: None, 2: b"body", 3: None, 4: b"body"}


async def test_only_results_in_between_expire(ledger: Ledger, clock: Clock):
    for seq in (1, 2, 3):
        clock.now = 100.0 * seq
        await finished(ledger, seq, Kind.OPTIM_STEP)
    await ledger.db.write(lambda s: journal.expire_results(s, 150.0, 300.0))

    kept = [
        seq
        for seq in (1, 2, 3)
        if (await ledger.db.read(lambda s, seq=seq: journal.find(s, f"{RUN}:{seq}"))).result
    ]
    assert kept == [1, 3]
