"""What is asked of an engine, from a prompt and its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.contract import SampleRequest
from server.core.errors import BadInput
from server.oai.errors import BadParameter
from server.oai.models import NamedModel
from server.oai.tokenizer import TextModel
from server.oai.wire import Order
from server.samplers.validation import check_sample_request


def check_length(what: str, length: int, model: NamedModel, text: TextModel) -> None:
    """Refuse what cannot fit before it is read: no token spells more than `text.longest`."""
    most = model.info.max_context_length * text.longest
    if length > most:
        raise BadParameter(
            f"{what}: holds {length} characters, more than fit this model's context of "
            f"{model.info.max_context_length} tokens.",
            what,
            "context_length_exceeded",
        )


def encoded(
    text: TextModel, prompts: Sequence[str | np.ndarray]
) -> list[tuple[str | None, np.ndarray]]:
    return [
        (prompt, text.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
        for prompt in prompts
    ]


def to_engine(
    id_: str, tokens: np.ndarray, order: Order, model: NamedModel, adapter: str | None
) -> SampleRequest:
    """`max_tokens` is clipped to what the prompt leaves of the context, as in `asample`."""
    scored = order.echo and order.topk is not None
    room = model.info.max_context_length - len(tokens)
    wanted = room if order.max_tokens is None else min(order.max_tokens, room)
    request = SampleRequest(
        request_id=id_,
        prompt=tokens,
        num_samples=order.n,
        max_tokens=max(wanted, 1),
        adapter=adapter,
        temperature=order.temperature,
        top_p=order.top_p,
        top_k=order.top_k,
        seed=order.seed,
        stop_token_ids=model.info.eos_token_ids,
        stop_strings=order.stops,
        prompt_logprobs=scored,
        topk_prompt_logprobs=(order.topk or 0) if scored else 0,
        topk_sample_logprobs=order.topk or 0,
    )
    try:
        check_sample_request(request, model.info)
    except BadInput as error:
        code = "context_length_exceeded" if room < 1 else None
        raise BadParameter(str(error), str(error).partition(":")[0], code) from error
    # Nothing to generate is no sample of the Tinker API; here it scores a prompt.
    return replace(request, max_tokens=wanted)
