"""Telling that memory ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has a class for accelerators; its CPU allocator only has words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
