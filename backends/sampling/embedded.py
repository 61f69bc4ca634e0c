"""The embedded engine: samples from the trainer's own frozen model, base and adapters at once.

Continuous batching: a step passes one packed row through the model, with the newest token of
every decoding sample and a bounded chunk of the prompts that are still being read. So a long
prompt delays the others by one chunk, and a sample joins or leaves between any two tokens.

Shapes: T tokens of the packed row, M rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.contract import Failure, SampleRequest, SampleResult
from backends.lora.head import chunk_rows, logits_rows
from backends.lora.peft_folder import AdapterFolderError, load_adapter
from backends.model import FrozenModel
from backends.sampling.batch import Batch, Piece, segments_of
from backends.sampling.choice import choose
from backends.sampling.jobs import Job, Sample
from backends.sampling.progress import Progress
from backends.sampling.requests import CANCELLED, DIVERGED, empty_sequence, mistake
from backends.sampling.residency import AdapterResidency
from backends.sampling.schedule import Schedule
from backends.sampling.stops import Decoder

Outcome = tuple[str, SampleResult | Failure]


class Candidate(NamedTuple):
    """A sample that gets its next token in this step."""

    sample: Sample
    logits: Tensor
    """float32[V]"""


class EmbeddedEngine:
    def __init__(
        self,
        model: FrozenModel,
        tokenizer: Decoder,
        *,
        max_batch_size: int = 32,
        kv_token_budget: int = 65_536,
        prefill_chunk_tokens: int = 256,
        adapter_budget_bytes: int = 1 << 30,
    ) -> None:
        """`max_batch_size` is how many samples decode at once; `kv_token_budget` bounds keys and
        values of all prompts and samples, cached prefixes included."""
        self._model = model
        self._kv_token_budget = kv_token_budget
        self._schedule = Schedule(tokenizer, max_batch_size, kv_token_budget, prefill_chunk_tokens)
        self._adapters = AdapterResidency(
            lambda folder: load_adapter(folder, model.targets, model.device), adapter_budget_bytes
        )
        self._finished: list[Outcome] = []
        self.progress = Progress()
        """Of the requests that are followed, step by step."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._schedule.waiting or self._schedule.jobs or self._finished)

    def add(self, request: SampleRequest) -> None:
        """Queue a request; what is wrong with it comes back from the next step."""
        failure = mistake(request, self._model.vocab_size, self._model.max_context_length)
        if failure is not None:
            self._finished.append((request.request_id, failure))
            return
        job = Job(request, self._model.max_context_length)
        if job.needed_tokens > self._kv_token_budget:
            self._finished.append((job.id, _too_big(job, self._kv_token_budget)))
            return
        self._schedule.waiting.append(job)

    def cancel(self, request_id: str) -> None:
        """Stop a request now; `take_finished` or the next step reports it. Unknown ones are over
        already."""
        schedule = self._schedule
        for job in [j for j in schedule.waiting if j.id == request_id]:
            schedule.waiting.remove(job)
            self._finished.append((job.id, CANCELLED))
        for job in [j for j in schedule.jobs if j.id == request_id]:
            self._fail(job, CANCELLED)

    def update(self, old: str, new: str) -> None:
        """Requests with the adapter in `old` go on with that in `new` from the next step. Raises
        AdapterFolderError."""
        schedule = self._schedule
        for job in [job for job in schedule.jobs if job.request.adapter == old]:
            job.follow(new, self._adapters.get(new))
        for job in [job for job in schedule.waiting if job.request.adapter == old]:
            job.follow(new, None)

    def abort(self) -> None:
        """Forget every request and every cached prefix, unreported: for a step that broke."""
        self._finished.clear()
        self.progress.clear()
        self._schedule.clear()

    def take_finished(self) -> list[Outcome]:
        """What ended without a step, each reported once."""
        finished, self._finished = self._finished, []
        for request_id, _ in finished:
            self.progress.forget(request_id)
        return finished

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """One pass; gives the requests it finished (and those that failed since the last one)."""
        self._admit()
        pieces = [*self._decoding_pieces(), *self._schedule.chunks()]
        candidates = self._forward(Batch.pack(pieces)) if pieces else []
        for sample in self._schedule.starting():
            assert sample.job.first_logits is not None
            candidates.append(Candidate(sample, sample.job.first_logits))
        if candidates:
            self._advance(candidates)
        self._collect()
        return self.take_finished()

    def _admit(self) -> None:
        for job in self._schedule.admit():
            folder = job.request.adapter
            if folder is None:
                continue
            try:
                job.adapter = self._adapters.get(folder)
            except AdapterFolderError as error:
                message = f"the adapter {folder} cannot be loaded: {error}"
                self._fail(job, Failure(message=message, category="server"))

    def _decoding_pieces(self) -> list[Piece]:
        pieces = []
        for sample in self._schedule.running:
            assert sample.row is not None
            self._schedule.rows.make_room(sample.row)
            newest = np.array(sample.tokens[-1:], np.int64)
            pieces.append(Piece(sample, newest, sample.row.length))
        return pieces

    def _forward(self, batch: Batch) -> list[Candidate]:
        """Pass the row through the model; keys and values land where their owners keep them."""
        device = self._model.device
        hidden = self._model.hidden(
            batch.tokens(device),
            batch.positions(device),
            batch.segments(),
            batch.plan(self._schedule.rows.slabs, device),
        )
        ended = []
        for piece, start in zip(batch.pieces, batch.starts, strict=True):
            if isinstance(piece.source, Sample):
                assert piece.source.row is not None
                piece.source.row.length += 1
                ended.append((piece, start))
            else:
                self._score(piece, hidden[start : start + len(piece.tokens)])
                piece.source.filled += len(piece.tokens)
                if piece.source.read:
                    ended.append((piece, start + len(piece.tokens) - 1))
        return self._last_logits(ended, hidden)

    def _score(self, piece: Piece, hidden: Tensor) -> None:
        """Hand the piece's rows that the request wants scored to its scorer, in chunks."""
        job = piece.job
        end = min(piece.position + len(piece.tokens), len(job.prompt) - 1)
        step = chunk_rows(self._model.vocab_size)
        for row in range(max(piece.position, job.scorer.first_row), end, step):
            stop = min(row + step, end)
            part = hidden[row - piece.position : stop - piece.position]
            segments = segments_of([(stop - row, job.adapter)])
            job.scorer.add(row, logits_rows(part, self._model.head_weight, segments))

    def _last_logits(self, ended: Sequence[tuple[Piece, int]], hidden: Tensor) -> list[Candidate]:
        """Logits after the last token of each piece that ends at a token to be continued."""
        if not ended:
            return []
        rows = torch.tensor([row for _, row in ended], device=hidden.device)
        segments = segments_of([(1, piece.job.adapter) for piece, _ in ended])
        logits = logits_rows(hidden[rows], self._model.head_weight, segments)
        candidates = []
        for (piece, _), row in zip(ended, logits, strict=True):
            if isinstance(piece.source, Sample):
                candidates.append(Candidate(piece.source, row))
            else:
                self._prompt_read(piece.source, row)
        return candidates

    def _prompt_read(self, job: Job, logits: Tensor) -> None:
        assert job.entry is not None
        self._schedule.cache.publish(job.entry)
        if job.max_new > 0:
            # A copy: a view would keep the logits of the whole step alive.
            job.first_logits = logits.clone()
        else:
            job.sequences = [empty_sequence(job.request)] * job.request.num_samples
            job.pending.clear()

    def _advance(self, candidates: Sequence[Candidate]) -> None:
        """Choose a token for each; the finished ones leave, the others decode on."""
        candidates = self._without_diverged(candidates)
        if not candidates:
            return
        logits = torch.stack([c.logits for c in candidates])
        samples = [c.sample for c in candidates]
        rules = [sample.job.rule for sample in samples]
        chosen = choose(logits, rules, [sample.uniform() for sample in samples])
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for i, (sample, token) in enumerate(zip(samples, chosen.tolist(), strict=True)):
            k = sample.job.request.topk_sample_logprobs
            topk = _topk(logprobs[i], k) if k else None
            self.progress.add(sample.job.id, sample.index, token, own[i], topk)
            sequence = sample.push(token, own[i], topk)
            if sequence is None:
                self._schedule.decode(sample)
            else:
                sample.job.sequences[sample.index] = sequence
                self._schedule.retire(sample)

    def _without_diverged(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """An adapter whose training diverged fails its own requests: nothing can be drawn from
        NaN, and the rows beside it are right."""
        finite = torch.stack([c.logits for c in candidates]).isfinite().all(dim=-1).tolist()
        bad = [c.sample.job for c, good in zip(candidates, finite, strict=True) if not good]
        for job in dict.fromkeys(bad):
            self._fail(job, DIVERGED)
        return [c for c in candidates if c.sample.job not in bad]

    def _collect(self) -> None:
        for job in list(self._schedule.jobs):
            if job.read:
                self._schedule.settle(job)
            if job.done:
                self._schedule.drop(job)
                self._finished.append((job.id, job.result()))

    def _fail(self, job: Job, failure: Failure) -> None:
        self._schedule.drop(job)
        self._finished.append((job.id, failure))


def _topk(logprobs: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[k] tokens and float32[k] logprobs, best first."""
    best = logprobs.topk(k)
    return best.indices.int().cpu().numpy(), best.values.cpu().numpy()


def _too_big(job: Job, budget: int) -> Failure:
    message = (
        f"the prompt of {len(job.prompt)} tokens and up to {job.max_new} new ones need room for "
        f"{job.needed_tokens} tokens of keys and values; this server has room for {budget}"
    )
    return Failure(message=message, category="user")
