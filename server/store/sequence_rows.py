"""The table of recorded samples. It names its session without referring to it: an entry lives
for a day, and is looked up by nothing but its id."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from server.store.rows import Base


class RecordedSequenceRow(Base):
    __tablename__ = "recorded_sequences"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    session_id: Mapped[str]
    prompt_length: Mapped[int]
    tokens: Mapped[bytes]
    logprobs: Mapped[bytes]
    expires_at: Mapped[float] = mapped_column(index=True)
