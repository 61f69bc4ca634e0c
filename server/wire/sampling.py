"""The JSON body of `asample`, to a request for a sampling engine."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from backends.contract import ModelInfo, SampleRequest
from server.core.errors import BadInput
from server.wire.json_shapes import ModelInputBody, Numbers, TensorBody, WireModel, parse_json
from server.wire.tensors import CellBudget, SparseLayout, sparse_layout, to_dense

_NOT_ASKED = -1
_TARGETS = "target_prompt_logprobs"


class SamplingParams(Numbers):
    """SDK 0.16 leaves out what its user did not set, so these defaults are the SDK's own."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: object = None
    """Read by `_stops`, which can say in one sentence what it may be."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(WireModel):
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = 1
    prompt: ModelInputBody
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False


def decode_sample(body: bytes) -> SampleBody:
    """Read an `asample` body; fields this service does not know are ignored."""
    return parse_json(SampleBody, body)


def to_sample_request(
    body: SampleBody,
    *,
    request_id: str,
    adapter: str | None,
    session: str,
    cache_namespace: str,
    info: ModelInfo,
) -> SampleRequest:
    """What the body asks of an engine; whether it can be had is for `samplers.validation`.

    `max_tokens` is clipped to what the prompt leaves of the context, and is all of that when
    absent. A seed may be any integer: it is folded to 63 bits.
    """
    params = body.sampling_params
    prompt = body.prompt.tokens("prompt")
    room = info.max_context_length - len(prompt)
    stop_token_ids, stop_strings = _stops(params.stop, info)
    return SampleRequest(
        request_id=request_id,
        prompt=prompt,
        num_samples=body.num_samples,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        adapter=adapter,
        session=session,
        cache_namespace=cache_namespace,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=None if params.seed is None else params.seed % 2**63,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        prompt_logprobs=body.prompt_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_tokens=_targets(body.target_prompt_logprobs),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
    )


def target_layout(body: SampleBody) -> SparseLayout | None:
    """Which cells `target_prompt_logprobs` listed if it was sparse, to answer in kind."""
    if body.target_prompt_logprobs is None:
        return None
    tensor = body.target_prompt_logprobs.flat(_TARGETS)
    return sparse_layout(_TARGETS, tensor) if tensor.is_sparse else None


def _targets(tensor: TensorBody | None) -> np.ndarray | None:
    if tensor is None:
        return None
    flat = tensor.flat(_TARGETS)
    if flat.values.dtype.kind != "i":
        raise BadInput(f"{_TARGETS}: dtype is {tensor.dtype}; token ids are int64.")
    return to_dense(_TARGETS, flat, CellBudget(), fill=_NOT_ASKED)


def _stops(stop: object, info: ModelInfo) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids and strings that end a sample.

    The SDK's word is that None "keeps implicit EOS stopping" and that [] "disables all stop
    tokens, including EOS". So the implicit EOS belongs to None alone, and whatever else is
    given is taken literally: it replaces EOS.
    """
    match stop:
        case None:
            return info.eos_token_ids, ()
        case str():
            return (), (stop,)
        case list() if all(isinstance(part, str) for part in stop):
            return (), tuple(stop)
        case list() if all(type(part) is int for part in stop):
            return tuple(stop), ()
    raise BadInput(
        "sampling_params.stop: must be a string, a list of strings, a list of token ids or null."
    )
