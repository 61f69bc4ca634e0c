"""What spans may say of recorded sequences, and how long those live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.contract import Datum, ForwardBackward, LossSignature, SampledSequence, SampleResult
from server.core.errors import BadInput
from server.core.ids import RequestId, SessionId, TenantId
from server.core.records import SamplerKind, SamplingSession
from server.core.sequences import LIFETIME_S
from server.runs.recorded import Found, Recorded
from server.samplers import recorded
from server.store.database import Database
from server.wire.provenance import Provenance, Span
from server.wire.training import TrainingSubmission
from tests.databases import Clock
from tests.unit.store.material import ME, SAMPLER, SESSION, run, sample

PROMPT = [10, 11, 12]
TOKENS = [20, 21]
LOGPROBS = [-0.5, -1.5]
ID = f"{SAMPLER}:1:0"
OTHER_ID = f"{SAMPLER}:1:1"
SIGNATURE = LossSignature(
    required=("target_tokens", "advantages"), optional=("logprobs",), recorded=("logprobs",)
)


def result() -> SampleResult:
    sequences = [(TOKENS, LOGPROBS), ([30], [-2.5])]
    return SampleResult(
        sequences=tuple(
            SampledSequence(
                tokens=np.array(tokens, np.int32),
                logprobs=np.array(logprobs, np.float32),
                stop_reason="length",
            )
            for tokens, logprobs in sequences
        )
    )


async def record(db: Database, clock: Clock, **change: Any) -> None:
    """Two sequences sampled from one prompt."""
    sampler = SamplingSession(
        id=SAMPLER,
        session_id=SESSION,
        owner=ME,
        base_model="tiny/fake",
        kind=SamplerKind.BASE,
        created_at=0.0,
    )
    request = replace(sample(1), id=RequestId(f"{SAMPLER}:1"))
    described = recorded.describe(sampler, request, len(PROMPT), result(), clock())
    sequences = [replace(sequence, **change) for sequence in described]
    await db.write(lambda session: recorded.add(session, sequences))


INPUT = (Span("prompt", ID, 0, 3), Span("sampled", ID, 0, 1))
ROWS = (Span("prompt", ID, 1, 2), Span("sampled", ID, 0, 2))
GOOD = Provenance(INPUT, ROWS)


def submission(
    *provenance: Provenance | None,
    tokens: Any = (10, 11, 12, 20),
    targets: Any = (0, 0, 20, 21),
    advantages: Any = (0, 0, 1, 1),
) -> TrainingSubmission:
    datum = Datum(
        tokens=np.array(tokens),
        loss_inputs={
            "target_tokens": np.array(targets),
            "advantages": np.array(advantages, np.float32),
        },
    )
    request = ForwardBackward(run="run", data=(datum,) * len(provenance), loss="stable_reinforce")
    return TrainingSubmission(model_id="run", seq_id=1, request=request, provenance=provenance)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(db: Database, clock: Clock) -> Recorded:
    return Recorded(db, clock, refuse=False)


async def test_the_logprobs_stand_where_the_targets_were_sampled(room, db, clock):
    await record(db, clock)
    found = await room.find(run(), submission(GOOD, GOOD))
    assert found.sequences == {ID}
    for row in found.logprobs:
        assert row.dtype == np.float32
        assert row.tolist() == [0.0, 0.0, *LOGPROBS]


async def test_part_of_a_sequence_and_two_of_them(room, db, clock):
    await record(db, clock)
    rows = (Span("prompt", ID, 0, 2), Span("sampled", ID, 1, 1), Span("sampled", OTHER_ID, 0, 1))
    inputs = (Span("prompt", OTHER_ID, 0, 3), Span("sampled", ID, 0, 1))
    sent = submission(Provenance(inputs, rows), targets=(0, 0, 21, 30))
    found = await room.find(run(), sent)
    assert found.logprobs[0].tolist() == [0.0, 0.0, -1.5, -2.5]
    assert found.sequences == {ID, OTHER_ID}


def spans(*rows: Span) -> TrainingSubmission:
    return submission(GOOD, Provenance(INPUT, rows))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (submission(GOOD, None), ("data[1]: has no provenance", "stable_reinforce")),
        (
            spans(Span("prompt", ID, 1, 2), Span("sampled", "gone:0", 0, 2)),
            ("data[1].loss_fn_input_spans[1]: sequence 'gone:0' is not known", "24 hours"),
        ),
        (
            spans(Span("prompt", ID, 2, 2), Span("sampled", ID, 0, 2)),
            ("data[1].loss_fn_input_spans[0]: ends at position 4 of the prompt", "3 tokens"),
        ),
        (
            spans(Span("prompt", ID, 1, 2), Span("sampled", ID, 1, 2)),
            ("data[1].loss_fn_input_spans[1]: ends at position 3 of the sampled", "2 tokens"),
        ),
        (
            spans(Span("prompt", ID, 1, 2), Span("sampled", ID, 2**62, 2)),
            (f"ends at position {2**62 + 2}",),
        ),
        (
            submission(GOOD, targets=(0, 0, 20, 22)),
            ("data[0].loss_fn_input_spans[1]: token 1 of the span is 22", "has 21"),
        ),
        (
            submission(GOOD, tokens=(10, 11, 12, 23)),
            ("data[0].model_input_spans[1]: token 0 of the span is 23", "has 20", "offset 0"),
        ),
        (
            submission(GOOD, advantages=(0, 0.5, 1, 1)),
            ("data[0].loss_fn_inputs['advantages']: is 0.5 at position 1", "must be 0"),
        ),
    ],
)
async def test_what_was_not_sampled_is_refused(room, db, clock, sent, words):
    await record(db, clock)
    with pytest.raises(BadInput) as caught:
        await room.find(run(), sent)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"owner": TenantId("other")}, "is not known"),
        ({"session_id": SessionId("session-2")}, "one session only"),
        ({"expires_at": 1_000_000.0}, "has expired"),
    ],
)
async def test_a_sequence_is_for_its_own_session_and_its_day(room, db, clock, change, word):
    await record(db, clock, **change)
    with pytest.raises(BadInput, match=word):
        await room.find(run(), submission(GOOD))


async def test_a_foreign_sequence_looks_like_one_that_does_not_exist(room, db, clock):
    with pytest.raises(BadInput) as unknown:
        await room.find(run(), submission(GOOD))
    await record(db, clock, owner=TenantId("other"), session_id=SessionId("session-2"))
    with pytest.raises(BadInput) as foreign:
        await room.find(run(), submission(GOOD))
    assert str(foreign.value) == str(unknown.value)


async def test_use_starts_the_day_again_for_what_was_used(room, db, clock):
    await record(db, clock)
    clock.now += LIFETIME_S - 1
    found = await room.find(run(), submission(GOOD))
    await db.write(lambda session: room.renew(session, found))
    clock.now += LIFETIME_S - 1
    await db.write(lambda session: recorded.remove_expired(session, clock()))
    assert set(await db.read(lambda s: recorded.find(s, [ID, OTHER_ID]))) == {ID}
    await room.find(run(), submission(GOOD))
    clock.now += 1
    await db.write(lambda session: recorded.remove_expired(session, clock()))
    assert await db.read(lambda s: recorded.find(s, [ID])) == {}


async def test_the_first_record_of_a_sequence_stands(db, clock):
    await record(db, clock)
    await record(db, clock, prompt_length=99)
    found = await db.read(lambda s: recorded.find(s, [ID, OTHER_ID]))
    assert {sequence.prompt_length for sequence in found.values()} == {3}
    assert found[ID].num_sampled == 2


async def test_thousands_of_names_at_once(room, db):
    found = Found([], frozenset(f"s:{i}" for i in range(3000)))
    assert await db.read(lambda s: recorded.find(s, found.sequences)) == {}
    await db.write(lambda session: room.renew(session, found))


async def test_kl_coeff_is_not_negative(room):
    sent = submission(GOOD)
    request = replace(sent.request, loss_config={"kl_coeff": -0.5})
    with pytest.raises(BadInput, match=r"kl_coeff'\]: is -0.5; it must be at least 0"):
        await room.find(run(), replace(sent, request=request))


def test_refusing_concerns_the_losses_that_need_a_record_alone(db, clock):
    refusing = Recorded(db, clock, refuse=True)
    refusing.check_served("ppo", LossSignature(required=()))
    refusing.check_served("no_such_loss", None)
    with pytest.raises(BadInput, match=r"'stable_reinforce' is refused .* not published"):
        refusing.check_served("stable_reinforce", SIGNATURE)
    Recorded(db, clock, refuse=False).check_served("stable_reinforce", SIGNATURE)
