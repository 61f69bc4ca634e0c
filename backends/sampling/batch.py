"""One step's packed row: a token of every decoding sample and chunks of prompts, by adapter.

Shapes: T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from backends.lora.adapter import Adapter
from backends.lora.linear import Segment
from backends.sampling.jobs import Job, Sample
from backends.sampling.kv import Row, Slab
from backends.sampling.plan import DecodingRows, PromptChunk, StepAttention


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, beginning at `position` of it."""

    source: Job | Sample
    tokens: np.ndarray
    """int64[n]"""
    position: int

    @property
    def job(self) -> Job:
        return self.source if isinstance(self.source, Job) else self.source.job


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces end to end, those of one adapter side by side."""

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    """Where each piece begins in the packed row."""

    @classmethod
    def pack(cls, pieces: Sequence[Piece]) -> Batch:
        ordered = sorted(pieces, key=lambda piece: piece.job.key.adapter or "")
        lengths = [len(piece.tokens) for piece in ordered]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
        return cls(tuple(ordered), tuple(starts))

    def tokens(self, device: torch.device) -> torch.Tensor:
        """int64[T]"""
        return torch.from_numpy(np.concatenate([p.tokens for p in self.pieces])).to(device)

    def positions(self, device: torch.device) -> torch.Tensor:
        """int64[T]"""
        spans = [np.arange(p.position, p.position + len(p.tokens)) for p in self.pieces]
        return torch.from_numpy(np.concatenate(spans)).to(device)

    def segments(self) -> list[Segment]:
        return segments_of([(len(p.tokens), p.job.adapter) for p in self.pieces])

    def plan(self, slabs: Sequence[Slab], device: torch.device) -> StepAttention:
        """Every row of `slabs` must have its sample among the pieces."""
        chunks, where = [], dict[Row, int]()
        for piece, start in zip(self.pieces, self.starts, strict=True):
            if isinstance(piece.source, Job):
                assert piece.source.entry is not None
                end = start + len(piece.tokens)
                chunks.append(PromptChunk(start, end, piece.position, piece.source.entry.kv))
            else:
                assert piece.source.row is not None
                where[piece.source.row] = start
        decoding = [DecodingRows(s, [where[row] for row in s.rows], device) for s in slabs]
        return StepAttention(chunks, decoding)


def segments_of(parts: Sequence[tuple[int, Adapter | None]]) -> list[Segment]:
    """Segments of (length, adapter) parts laid end to end, neighbours of one adapter merged."""
    segments: list[Segment] = []
    start = 0
    for length, adapter in parts:
        if segments and segments[-1].adapter is adapter:
            start_of_run = segments.pop().start
        else:
            start_of_run = start
        start += length
        segments.append(Segment(start_of_run, start, adapter))
    return segments
