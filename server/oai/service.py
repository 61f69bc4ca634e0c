"""OpenAI's way to sample: text in, text out, in one call.

Nothing here is journaled: the answer belongs to the connection that asked, which nobody can take
up again. What a call uses is counted all the same (`bills.py`), and while it runs it is one of its
tenant's waiting samples.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.contract import SampleDelta, SampleRequest, SampleResult
from server.core.records import Tenant
from server.oai import generation, wire
from server.oai.asking import check_length, encoded, to_engine
from server.oai.bills import Bills
from server.oai.choices import Prompt, total
from server.oai.dialects import Chat, Completions, Dialect, Head, Json
from server.oai.errors import BadParameter
from server.oai.messages import plain
from server.oai.models import Models, NamedModel
from server.oai.prompts import read_prompts
from server.oai.template import TemplateRefused
from server.oai.tokenizer import TextModel
from server.oai.wire import ChatBody, CompletionBody, Order
from server.samplers.gate import GatedEngine
from server.samplers.service import Samplers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call that has been understood."""

    tenant: Tenant
    model: NamedModel
    text: TextModel
    dialect: Dialect
    head: Head
    prompts: Sequence[Prompt]
    requests: Sequence[SampleRequest]
    """One a prompt."""
    include_usage: bool


class OpenAI:
    def __init__(
        self,
        *,
        models: Models,
        samplers: Samplers,
        bills: Bills,
        clock: Callable[[], float],
    ) -> None:
        self.models = models
        self.bills = bills
        self._samplers = samplers
        self._clock = clock

    async def chat(self, tenant: Tenant, body: ChatBody) -> Job:
        """Raises BadParameter or UnknownModel."""
        order = wire.chat_order(body)
        model = await self.models.named(tenant, order.model)
        text = await self.models.text(model.base_model)
        if text.no_chat is not None:
            raise BadParameter(f"model {model.base_model!r} {text.no_chat}.", "model")
        messages = plain(body.messages)
        check_length("messages", sum(len(one["content"]) for one in messages), model, text)
        try:
            tokens = await asyncio.to_thread(text.encode_chat, messages, body.chat_template_kwargs)
        except TemplateRefused as error:
            raise BadParameter(f"messages: {error}", "messages") from error
        return self._job(tenant, model, text, Chat(), order, [(None, tokens)], body)

    async def complete(self, tenant: Tenant, body: CompletionBody) -> Job:
        """Raises BadParameter or UnknownModel."""
        order = wire.completion_order(body)
        prompts = read_prompts(body)
        model = await self.models.named(tenant, order.model)
        text = await self.models.text(model.base_model)
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length("prompt", len(prompt), model, text)
        tokens = await asyncio.to_thread(encoded, text, prompts)
        return self._job(tenant, model, text, Completions(), order, tokens, body)

    async def answer(self, job: Job) -> Json:
        """All of it at once. Raises QueueFull, or what generating raises."""
        with self._run(job) as engine:
            results = await generation.generate(engine, job.requests)
        for prompt, result in zip(job.prompts, results, strict=True):
            prompt.tally.finish(result)
        self._charge(job)
        return await asyncio.to_thread(_whole, job, results)

    async def stream(self, job: Job) -> AsyncGenerator[Json]:
        """Chunks as they come. A reader that leaves early stops the generation, and is charged
        with what it got. Raises like `answer`."""
        with self._run(job) as engine, self._charged(job):
            async with aclosing(generation.stream(engine, job.requests)) as parts:
                async for number, part in parts:
                    for chunk in _chunks(job, job.prompts[number], part):
                        yield chunk
        if job.include_usage:
            yield {**job.dialect.last(job.head), "usage": _usage(job)}

    async def stop(self) -> None:
        await self.bills.stop()

    def _run(self, job: Job) -> AbstractContextManager[GatedEngine]:
        """Raises QueueFull."""
        return self._samplers.unjournaled(job.tenant, job.model.base_model, job.requests)

    def _job(
        self,
        tenant: Tenant,
        model: NamedModel,
        text: TextModel,
        dialect: Dialect,
        order: Order,
        asked: Sequence[tuple[str | None, np.ndarray]],
        body: ChatBody | CompletionBody,
    ) -> Job:
        id_ = f"{dialect.prefix}-{secrets.token_hex(16)}"
        requests = [
            to_engine(f"{id_}:{i}", tokens, order, model, self.models.adapter(model))
            for i, (_, tokens) in enumerate(asked)
        ]
        prompts = [
            Prompt(sent.prompt, string, order, text, model.info.eos_token_ids, i * order.n)
            for i, ((string, _), sent) in enumerate(zip(asked, requests, strict=True))
        ]
        return Job(
            tenant=tenant,
            model=model,
            text=text,
            dialect=dialect,
            head=Head(
                id=id_,
                created=int(self._clock()),
                model=order.model,
                logprobs=order.topk is not None,
            ),
            prompts=prompts,
            requests=requests,
            include_usage=body.stream_options.include_usage,
        )

    @contextmanager
    def _charged(self, job: Job) -> Generator[None]:
        try:
            yield
        finally:
            self._charge(job)

    def _charge(self, job: Job) -> None:
        """What failed before anybody saw a token of it costs nothing."""
        for prompt, request in zip(job.prompts, job.requests, strict=True):
            if prompt.tally.over or prompt.tally.generated:
                self.bills.charge(
                    request.request_id, job.tenant.id, job.model.base_model, prompt.tally.cost
                )


def _whole(job: Job, results: Sequence[SampleResult]) -> Json:
    choices = [
        choice
        for prompt, result in zip(job.prompts, results, strict=True)
        for choice in prompt.choices(result)
    ]
    answer = job.dialect.whole(job.head, choices, job.text)
    return {**answer, "usage": _usage(job)}


def _chunks(job: Job, prompt: Prompt, part: SampleDelta | SampleResult) -> Iterator[Json]:
    steps = [prompt.gain(part)] if isinstance(part, SampleDelta) else prompt.ends_with(part)
    for step in steps:
        for chunk in job.dialect.chunks(job.head, step, job.text):
            # OpenAI says null in every chunk but the last where usage is asked for.
            yield {**chunk, "usage": None} if job.include_usage else chunk


def _usage(job: Job) -> dict[str, Any]:
    return total([prompt.tally for prompt in job.prompts])
