"""Losses that clients send as graphs, run by an allow-list interpreter."""

from __future__ import annotations

from backends.losses.graph.loss import custom_loss as custom_loss
from backends.losses.graph.program import refusal as refusal
