"""The inputs of a loss that were recorded when its tokens were sampled.

What spans may say is the vendor's: sequences of the run's own session alone (Tinker
documentation, "Datum", "Provenance"), for a day after their last use ("StableReinforce"), and
advantages other than 0 on sampled tokens only (tinker-cookbook 0.6.1, `rl/train.py`). Prompt
tokens are not compared: the cookbook's `rl_loop.py` sends 0 for the targets of a prompt.

Other losses need no spans and do not look at them: the cookbook attaches spans to every datum,
also where nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from backends.contract import Datum, LossSignature
from server.core.errors import BadInput
from server.core.records import Run
from server.core.sequences import LIFETIME_S, RecordedSequence
from server.samplers import recorded
from server.store.database import AsyncSession, Database
from server.wire.checks import first_position, shown
from server.wire.provenance import Provenance, Span, placed
from server.wire.training import TrainingSubmission

_NAMED = 120
"""Characters of a client's text that an error repeats."""


@dataclass(frozen=True, slots=True)
class Found:
    logprobs: list[np.ndarray]
    """float32[N] a datum: of the policy that sampled, and 0 where nothing was."""
    sequences: frozenset[str]


class Recorded:
    """`refuse` has the losses that read recorded inputs refused."""

    def __init__(self, db: Database, clock: Callable[[], float], *, refuse: bool) -> None:
        self._db = db
        self._clock = clock
        self._refuse = refuse

    def check_served(self, loss: str, signature: LossSignature | None) -> None:
        if self._refuse and signature is not None and signature.recorded:
            raise BadInput(
                f"loss_fn: {loss!r} is refused by this server, because the vendor's objective of "
                f'that name is not published; `stable_reinforce = "closest"` in its settings '
                f"has the closest published one computed instead."
            )

    async def find(self, run: Run, submission: TrainingSubmission) -> Found:
        """What was recorded for a submission's datums. Raises BadInput for the first span that
        does not say what was sampled."""
        _check_kl_coeff(submission.request.loss_config)
        data = submission.request.data
        traced = [
            (f"data[{i}]", datum, _needed(f"data[{i}]", origin, submission.request.loss))
            for i, (datum, origin) in enumerate(zip(data, submission.provenance, strict=True))
        ]
        ids = frozenset(s.sequence_id for _, _, origin in traced for s in _spans(origin))
        known = await self._db.read(lambda db: recorded.find(db, ids))
        reader = _Reader(run, known, self._clock())
        return Found([reader.logprobs(*one) for one in traced], ids)

    async def renew(self, db: AsyncSession, found: Found) -> None:
        await recorded.renew(db, found.sequences, self._clock())


def _check_kl_coeff(config: Mapping[str, float | str]) -> None:
    kl_coeff = config.get("kl_coeff", 0.0)
    if float(kl_coeff) < 0:
        raise BadInput(f"loss_fn_config['kl_coeff']: is {kl_coeff}; it must be at least 0.")


def _needed(where: str, provenance: Provenance | None, loss: str) -> Provenance:
    if provenance is None:
        raise BadInput(
            f"{where}: has no provenance; {loss} needs it on every datum "
            f"(Datum.with_provenance, with sequences sampled under record_stability_info)."
        )
    return provenance


def _spans(provenance: Provenance) -> Iterator[Span]:
    yield from provenance.model_input
    yield from provenance.loss_rows


class _Reader:
    """Reads spans of one run's request against the sequences that are known."""

    def __init__(self, run: Run, known: dict[str, RecordedSequence], now: float) -> None:
        self._run = run
        self._known = known
        self._now = now

    def logprobs(self, where: str, datum: Datum, provenance: Provenance) -> np.ndarray:
        """float32[N] of a datum, all of whose spans are true."""
        found = np.zeros(len(datum.tokens), dtype=np.float32)
        sampled = np.zeros(len(datum.tokens), dtype=bool)
        targets = datum.loss_inputs["target_tokens"]
        for is_input, place, start, span in placed(where, provenance):
            sequence = self._sequence(place, span)
            _check_inside(place, span, sequence)
            if span.kind == "prompt":
                continue
            here = slice(start, start + span.length)
            _check_tokens(place, span, (datum.tokens if is_input else targets)[here], sequence)
            if not is_input:
                sampled[here] = True
                found[here] = _part(sequence.logprobs, "<f4", span)
        _check_advantages(where, datum.loss_inputs["advantages"], sampled)
        return found

    def _sequence(self, place: str, span: Span) -> RecordedSequence:
        """Raises BadInput unless this run may train on it now."""
        sequence = self._known.get(span.sequence_id)
        name = f"{place}: sequence {span.sequence_id[:_NAMED]!r}"
        if sequence is None or sequence.owner != self._run.owner:
            raise BadInput(
                f"{name} is not known; only what was sampled under record_stability_info is, and "
                f"for {LIFETIME_S / 3600:g} hours after its last use."
            )
        if sequence.session_id != self._run.session_id:
            raise BadInput(
                f"{name} was sampled in session {sequence.session_id}; this run is of session "
                f"{self._run.session_id}, and provenance works within one session only."
            )
        if sequence.expires_at <= self._now:
            raise BadInput(
                f"{name} has expired; it can be trained on for {LIFETIME_S / 3600:g} hours after "
                f"it was sampled or last used."
            )
        return sequence


def _check_inside(place: str, span: Span, sequence: RecordedSequence) -> None:
    prompt = span.kind == "prompt"
    limit = sequence.prompt_length if prompt else sequence.num_sampled
    end = span.offset + span.length
    if end > limit:
        what = "prompt" if prompt else "sampled part"
        raise BadInput(
            f"{place}: ends at position {end} of the {what} of sequence "
            f"{span.sequence_id!r}, which has {limit} tokens."
        )


def _check_tokens(place: str, span: Span, tokens: np.ndarray, sequence: RecordedSequence) -> None:
    was = _part(sequence.tokens, "<i4", span)
    if not np.array_equal(tokens, was):
        (position,) = first_position(tokens != was)
        raise BadInput(
            f"{place}: token {position} of the span is {tokens[position]}; sequence "
            f"{span.sequence_id!r} has {was[position]} there, at offset {span.offset + position}."
        )


def _check_advantages(where: str, advantages: np.ndarray, sampled: np.ndarray) -> None:
    wrong = (advantages != 0) & ~sampled
    if wrong.any():
        position = first_position(wrong)
        raise BadInput(
            f"{where}.loss_fn_inputs['advantages']: is {advantages[position]} at position "
            f"{shown(position)}, where the target was not sampled; it must be 0 there."
        )


def _part(raw: bytes, dtype: str, span: Span) -> np.ndarray:
    return np.frombuffer(raw, dtype)[span.offset : span.offset + span.length]
