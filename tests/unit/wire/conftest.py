"""Values that several tests of the wire need."""

from __future__ import annotations

import pytest
from hypothesis import settings

from backends.contract import LossSignature, ModelInfo

# A time limit a test case would make a busy machine fail honest code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def info() -> ModelInfo:
    return ModelInfo(
        vocab_size=100,
        max_context_length=16,
        num_parameters=1000,
        dtype="float32",
        device="cpu",
        trainable_groups=("attn", "mlp"),
        eos_token_ids=(2, 3),
        losses={"cross_entropy": LossSignature(required=("target_tokens",))},
    )
