"""What the audit log tells: who did what, to which checkpoint, key or project."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from server.core.ids import SessionId, TenantId, user_urn
from server.core.records import Checkpoint, Tenant


class Resource(StrEnum):
    """What an event is about; the value is what clients filter by."""

    CHECKPOINTS = "checkpoints"
    PROJECTS = "projects"
    ORGANIZATIONS = "organizations"
    """API keys, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float
    owner: TenantId
    """Who may read of it: whoever did it, and whose resource it was."""
    resource: Resource
    event: str
    """<resource>_<action>"""
    details: dict[str, Any] = field(default_factory=dict)


def of_checkpoint(action: str, checkpoint: Checkpoint, at: float, **details: Any) -> Event:
    """Something was done to a checkpoint by its owner, or by a lifetime that its owner had set."""
    return Event(
        at=at,
        owner=checkpoint.owner,
        resource=Resource.CHECKPOINTS,
        event=f"checkpoint_{action}",
        details={
            "actor": user_urn(checkpoint.owner),
            "tinker_path": str(checkpoint.path),
            "training_run_id": checkpoint.run_id,
            "project_id": checkpoint.project,
            **details,
        },
    )


def of_read(reader: TenantId, checkpoint: Checkpoint, at: float, purpose: str) -> Event:
    """Somebody was given a checkpoint's files. It is told to the reader alone: who publishes a
    checkpoint does not learn who is on the server."""
    event = of_checkpoint("read", checkpoint, at, actor=user_urn(reader), purpose=purpose)
    return replace(event, owner=reader)


def of_key(action: str, tenant: Tenant, at: float) -> Event:
    """A key was made or ended. `actor` is who holds it: the one who made it on the server's
    command line has no name here."""
    return Event(
        at=at,
        owner=tenant.id,
        resource=Resource.ORGANIZATIONS,
        event=f"apikey_{action}",
        details={
            "actor": user_urn(tenant.id),
            "key_name": tenant.name,
            "project_id": tenant.project,
        },
    )


def of_assignment(
    tenant: TenantId, session: SessionId, before: str, after: str, at: float
) -> Event:
    return Event(
        at=at,
        owner=tenant,
        resource=Resource.PROJECTS,
        event="project_assigned",
        details={
            "actor": user_urn(tenant),
            "session_id": session,
            "project_id": after,
            "previous_project_id": before,
        },
    )
