"""Names of things, and how the derived ones are built.

Ids that a retry must find again are derived from what the client sent; only sessions and
checkpoint folders get random ones.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import NewType

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
SamplingSessionId = NewType("SamplingSessionId", str)
CustomLossId = NewType("CustomLossId", str)
"""Of a session's losses; each has a number behind it."""
RequestId = NewType("RequestId", str)

CLONE_SIZE = 1_000_000_000
"""A sampling client numbers its requests from clone * CLONE_SIZE on."""


def new_session_id() -> SessionId:
    return SessionId(f"session-{secrets.token_hex(8)}")


def new_folder_name() -> str:
    return secrets.token_hex(12)


def run_id(session: SessionId, model_seq_id: int) -> RunId:
    """The SDK builds this id itself when it resumes a run, so its form is not ours to choose."""
    return RunId(f"{session}:train:{model_seq_id}")


def holder_id(tenant: TenantId, key: str) -> RunId:
    """A run that holds copied checkpoints, by what its client calls the copying."""
    digest = hashlib.sha256("\n".join([tenant, key]).encode()).hexdigest()
    return RunId(f"copy-{digest[:24]}")


def sampling_session_id(session: SessionId, seq_id: int) -> SamplingSessionId:
    return SamplingSessionId(f"{session}:sample:{seq_id}")


def custom_loss_id(session: SessionId) -> CustomLossId:
    return CustomLossId(f"{session}:loss")


def request_id(owner: RunId | SamplingSessionId | CustomLossId, seq_id: int) -> RequestId:
    """A re-sent submission carries the same seq_id, and so gets the same future."""
    return RequestId(f"{owner}:{seq_id}")


def sequence_ids(request: RequestId, num_samples: int) -> list[str]:
    return [f"{request}:{index}" for index in range(num_samples)]


def user_urn(tenant: TenantId) -> str:
    """A tenant as the SDK names the owner of something."""
    return f"tml:organization_user:{tenant}"
