"""The sampling replicas of all base models, as their operators know them: each has its own name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

from backends.contract import BackendError, PauseMode, ReplicaStatus, SamplingFleet
from server.core.errors import NotFound, Unavailable


class Replicas:
    def __init__(self, fleets: Mapping[str, SamplingFleet], changed: Callable[[], None]) -> None:
        """`fleets` by base model: those that have replicas. `changed` is called when a request may
        have to wait, or not wait any more."""
        self._fleets = fleets
        self._changed = changed

    def all(self) -> Iterator[tuple[str, ReplicaStatus]]:
        """Each with its base model."""
        for model, fleet in self._fleets.items():
            for status in fleet.replicas():
                yield model, status

    async def pause(self, name: str, mode: PauseMode) -> None:
        """Raises NotFound, or Unavailable when the replica cannot do what is asked."""
        await self._control(name, lambda fleet: fleet.pause(name, mode))

    async def drain(self, name: str) -> None:
        """Raises like `pause`."""
        await self._control(name, lambda fleet: fleet.drain(name))

    async def resume(self, name: str) -> None:
        """Raises like `pause`."""
        await self._control(name, lambda fleet: fleet.resume(name))

    def held_up(self, base_model: str | None, request_id: str) -> str | None:
        """Why nothing is being generated for a sample, if nothing can be."""
        fleet = None if base_model is None else self._fleets.get(base_model)
        return None if fleet is None else fleet.held_up(request_id)

    async def _control(self, name: str, call: Callable[[SamplingFleet], Awaitable[None]]) -> None:
        try:
            await call(self._fleet_of(name))
        except BackendError as error:
            raise Unavailable(str(error)) from error
        finally:
            self._changed()

    def _fleet_of(self, name: str) -> SamplingFleet:
        for fleet in self._fleets.values():
            if any(status.name == name for status in fleet.replicas()):
                return fleet
        known = ", ".join(status.name for _, status in self.all()) or "none"
        raise NotFound(f"replica {name[:100]!r} does not exist; there are: {known}")
