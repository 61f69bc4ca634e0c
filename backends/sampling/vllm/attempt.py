"""One request on one replica: its calls made together, and their answers put into one result."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from backends.contract import SampleDelta, SampledSequence, SampleRequest, SampleResult
from backends.sampling.requests import empty_sequence
from backends.sampling.vllm import translate
from backends.sampling.vllm.alternatives import drawn_alternatives
from backends.sampling.vllm.answer import Answer
from backends.sampling.vllm.client import Body, ReplicaClient
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.prompt_scores import prompt_fields
from backends.sampling.vllm.samples import SampleReader
from backends.sampling.vllm.together import together
from backends.sampling.vllm.translate import Generation, Limits, Scoring

OnDelta = Callable[[SampleDelta], None]
Scored = tuple[Scoring, Answer]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Every call may raise ReplicaLost, Refused and RequestFailed."""

    request: SampleRequest
    facts: ModelFacts
    limits: Limits
    seed: int | None
    client: ReplicaClient
    model: str
    """What the replica calls the adapter."""
    on_delta: OnDelta | None
    """Called with what samples gain; None when nobody listens."""

    async def run(self) -> SampleResult:
        request = self.request
        max_new = min(request.max_tokens, self.facts.max_context_length - len(request.prompt))
        scorings = translate.scorings(request, self.limits.max_logprobs)
        readers = [SampleReader(request, self.facts.decoder) for _ in range(request.num_samples)]
        generations: list[Generation] = []
        if max_new > 0:
            generations = translate.generations(
                request, self.model, max_new, self.seed, self.limits, self.facts.decoder
            )
        joined = self._join(generations, scorings)
        async with together() as group:
            generated = [group.create_task(self._generate(one, readers)) for one in generations]
            scored = [group.create_task(self._score(one)) for one in scorings[int(joined) :]]
            alternatives = group.create_task(self._alternatives())
        answers = [task.result() for task in generated]
        first = [(scorings[0], answers[0])] if joined else []
        return SampleResult(
            sequences=_sequences(request, readers, bool(generations)),
            prompt_cache_hit_tokens=max((a.cached_tokens for a in answers), default=0),
            **prompt_fields(request, first + [task.result() for task in scored]),
            **alternatives.result(),
        )

    def _join(self, generations: list[Generation], scorings: list[Scoring]) -> bool:
        """Score within the generating call if there is a single sample: vLLM reads the prompt of
        each sample anew when it scores. Events of a stream have no place for scores."""
        alone = len(generations) == 1 and len(generations[0].samples) == 1
        if not (alone and scorings and self.on_delta is None):
            return False
        generations[0].body["sampling_params"] |= scorings[0].params
        return True

    async def _generate(self, one: Generation, readers: list[SampleReader]) -> Answer:
        last = Answer()
        async with aclosing(self._events(one.body)) as events:
            async for last in events:
                for choice in last.choices:
                    samples = one.samples[choice.index]
                    # Samples that are alike are read once.
                    part = readers[samples[0]].add(choice)
                    if part and self.on_delta is not None:
                        for index in samples:
                            self.on_delta(readers[samples[0]].delta(index, part))
        for same in one.samples:
            for index in same[1:]:
                readers[index] = readers[same[0]]
        return last

    async def _events(self, body: Body) -> AsyncGenerator[Answer]:
        session = self.request.session
        if self.on_delta is None:
            yield await self.client.generate(body, session)
            return
        async with aclosing(self.client.stream(body, session)) as events:
            async for event in events:
                yield event

    async def _score(self, scoring: Scoring) -> Scored:
        request = self.request
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0} | scoring.params
        body = translate.call(request, self.model, request.prompt, params)
        return scoring, await self.client.generate(body, request.session)

    async def _alternatives(self) -> dict[str, Any]:
        if not translate.draws_alternatives(self.request):
            return {}
        assert self.seed is not None
        return await drawn_alternatives(
            self.request,
            self.model,
            self.seed,
            self.limits,
            lambda body: self.client.generate(body, self.request.session),
        )


def _sequences(
    request: SampleRequest, readers: list[SampleReader], generated: bool
) -> tuple[SampledSequence, ...]:
    if not generated:
        return (empty_sequence(request),) * request.num_samples
    return tuple(reader.sequence() for reader in readers)
