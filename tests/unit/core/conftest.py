"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# A time limit a test case would make a busy machine fail honest code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
