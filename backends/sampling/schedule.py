"""Who is in memory and what is read next: admission, room for keys and values, prompt chunks.

Every admitted job holds room for its prompt and for one of its samples, so it can always finish;
further samples begin as room and batch allow. Jobs are admitted in the order they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from backends.sampling.batch import Piece
from backends.sampling.jobs import Job, Sample
from backends.sampling.kv import RowStore
from backends.sampling.prefix_cache import PrefixCache, common_prefix
from backends.sampling.stops import Decoder

_WORTH_WAITING = 16
"""A job lets an earlier one finish its prompt if that saves it more tokens than this."""


class Schedule:
    def __init__(
        self, decoder: Decoder, max_batch_size: int, kv_token_budget: int, chunk_tokens: int
    ) -> None:
        self.cache = PrefixCache(kv_token_budget)
        self.rows = RowStore()
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job] = []
        self.running: list[Sample] = []
        """Samples that decode a token in every step."""
        self._decoder = decoder
        self._max_batch_size = max_batch_size
        self._chunk_tokens = chunk_tokens

    def admit(self) -> Iterator[Job]:
        """Jobs that find room now. The caller gives each its adapter, or drops it."""
        while self.waiting and len(self.jobs) < self._max_batch_size:
            job = self.waiting[0]
            if not self.cache.reserve(job.needed_tokens):
                return
            self.waiting.popleft()
            job.entry = self.cache.open(job.key, job.prompt)
            job.rooms = job.idle_rooms = 1 if job.row_tokens else 0
            self.jobs.append(job)
            yield job

    def chunks(self) -> list[Piece]:
        """The prompt tokens to read in this step, oldest job first. A prompt that begins like
        one still being read waits for it and then copies: a group of rollouts that arrive
        together pay for their prompt once."""
        pieces, unread, left = [], list[Job](), self._chunk_tokens
        for job in self.jobs:
            if job.read or not left:
                continue
            if job.hit_tokens is None and not self._begin(job, unread):
                unread.append(job)
                continue
            unread.append(job)
            tokens = job.prompt[job.filled : job.filled + left]
            pieces.append(Piece(job, tokens, job.filled))
            left -= len(tokens)
        return pieces

    def starting(self) -> list[Sample]:
        """Samples whose first token can be drawn now."""
        started: list[Sample] = []
        for job in self.jobs:
            while job.pending and job.first_logits is not None:
                full = len(self.running) + len(started) >= self._max_batch_size
                if full or not self._take_room(job):
                    break
                started.append(Sample(job, job.pending.popleft(), self._decoder))
        return started

    def decode(self, sample: Sample) -> None:
        """Let a sample decode on, from the next step."""
        if sample.row is None:
            assert sample.job.entry is not None
            sample.row = self.rows.fork(sample.job.entry.kv)
            self.running.append(sample)

    def retire(self, sample: Sample) -> None:
        """Take a finished sample out; its room is free for the next of its job."""
        job = sample.job
        job.idle_rooms += 1 if job.row_tokens else 0
        if sample.row is not None:
            self.running.remove(sample)
            if job.request.num_samples == 1:
                self._keep(sample)
            self.rows.free(sample.row)

    def settle(self, job: Job) -> None:
        """Give back what a job no longer needs once its last sample has begun."""
        if job.pending:
            return
        if job.entry is not None:
            self.cache.unpin(job.entry)
            job.entry = None
        self.cache.release(job.idle_rooms * job.row_tokens)
        job.rooms -= job.idle_rooms
        job.idle_rooms = 0

    def drop(self, job: Job) -> None:
        """Forget an admitted job, finished or not."""
        for sample in [s for s in self.running if s.job is job]:
            self.running.remove(sample)
            assert sample.row is not None
            self.rows.free(sample.row)
        job.pending.clear()
        job.idle_rooms = job.rooms
        self.settle(job)
        self.jobs.remove(job)

    def clear(self) -> None:
        """Forget everything."""
        self.jobs.clear()
        self.waiting.clear()
        self.running.clear()
        self.rows.clear()
        self.cache.clear()

    def _begin(self, job: Job, earlier: list[Job]) -> bool:
        """Copy what the cache has of a prompt, unless an earlier job is about to have more."""
        limit = job.scorer.first_row
        entry, length = self.cache.longest(job.key, job.prompt, limit)
        promised = (
            min(common_prefix(other.prompt, job.prompt), limit)
            for other in earlier
            if other.key == job.key
        )
        if max(promised, default=0) > length + _WORTH_WAITING:
            return False
        if entry is not None:
            assert job.entry is not None
            job.entry.kv.copy_from(entry.kv.tensors, length)
        job.filled = job.hit_tokens = length
        return True

    def _take_room(self, job: Job) -> bool:
        if not job.row_tokens:
            return True
        if job.idle_rooms:
            job.idle_rooms -= 1
            return True
        if self.cache.reserve(job.row_tokens):
            job.rooms += 1
            return True
        return False

    def _keep(self, sample: Sample) -> None:
        """A lone sample's whole text is likely the start of the next turn's prompt."""
        assert sample.row is not None
        length = sample.row.length
        if self.cache.reserve(length):
            entry = self.cache.open(sample.job.key, sample.context[:length])
            entry.kv.copy_from(sample.row.views(), length)
            self.cache.publish(entry)
            self.cache.unpin(entry)
