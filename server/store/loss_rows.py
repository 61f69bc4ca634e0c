"""The table of custom losses."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from server.store.rows import Base


class CustomLossRow(Base):
    """A loss that a client has uploaded, for its session, for as long as there is the session."""

    __tablename__ = "custom_losses"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str]
    body: Mapped[bytes]
    """The request as it came: read again, by the same code, wherever the loss is used."""
    created_at: Mapped[float]
