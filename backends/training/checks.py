"""Why a request cannot be computed. The service checks first, with better words; here it keeps
one request's bad index from breaking the device for all."""

from __future__ import annotations

import numpy as np

from backends.contract import CustomLoss, Datum, ForwardBackward, LossSignature, ModelInfo
from backends.losses.graph.limits import MAX_NODE_RUNS


def refusal(request: ForwardBackward, info: ModelInfo, first: int = 0) -> str | None:
    """One sentence that says what is wrong, or None. Datums are numbered from `first`, which is
    how many came in earlier parts of the request."""
    if request.custom_loss is not None:
        return custom_refusal(request, request.custom_loss, info, first)
    signature = info.losses.get(request.loss)
    if signature is None:
        return f"loss {request.loss!r} is unknown; known are {sorted(info.losses)}"
    for key, value in request.loss_config.items():
        if key not in signature.config or isinstance(value, str) or not np.isfinite(value):
            return f"loss_config {key} = {value!r} is no finite number {request.loss} knows"
    for index, datum in enumerate(request.data, first):
        reason = _datum_refusal(datum, signature, info)
        if reason is not None:
            return f"datum {index}: {reason}"
    return None


def _datum_refusal(datum: Datum, signature: LossSignature, info: ModelInfo) -> str | None:
    num_tokens = len(datum.tokens)
    missing = [name for name in signature.required if name not in datum.loss_inputs]
    if missing:
        return f"{missing[0]} is missing"
    targets = datum.loss_inputs["target_tokens"]
    if targets.ndim != 1 and not (signature.many_targets and targets.ndim == 2 and targets.size):
        return f"target_tokens has shape {list(targets.shape)}"
    for name in (*signature.required, *signature.optional):
        values = datum.loss_inputs.get(name)
        if values is not None and (len(values) != num_tokens or values.shape != targets.shape):
            return f"{name} has shape {list(values.shape)} for {num_tokens} tokens"
    return _ids_refusal(datum, info)


def custom_refusal(
    request: ForwardBackward, loss: CustomLoss, info: ModelInfo, first: int
) -> str | None:
    """The same for a loss that declares its own inputs."""
    if len(loss.nodes) * request.num_data > MAX_NODE_RUNS:
        return f"{len(loss.nodes)} nodes for each of {request.num_data} datums are too many"
    if not loss.inputs:
        return "the custom loss has no inputs"
    declared = [("target_tokens", loss.inputs[0].rank)]
    declared += [(one.name, one.rank) for one in loss.inputs[1:]]
    for index, datum in enumerate(request.data, first):
        for name, rank in declared:
            values = datum.loss_inputs.get(name)
            if values is None or not has_rank(values, rank):
                return f"datum {index}: {name} must be there, with rank {rank}"
        reason = _ids_refusal(datum, info)
        if reason is not None:
            return f"datum {index}: {reason}"
    return None


def has_rank(values: np.ndarray, rank: int) -> bool:
    """A number travels as an array of one."""
    return values.size == 1 if rank == 0 else values.ndim == rank


def _ids_refusal(datum: Datum, info: ModelInfo) -> str | None:
    num_tokens, targets = len(datum.tokens), datum.loss_inputs["target_tokens"]
    if not 0 < num_tokens <= info.max_context_length:
        return f"{num_tokens} tokens, where 1 to {info.max_context_length} are possible"
    if len(targets) != num_tokens or not targets.size:
        return f"target_tokens has shape {list(targets.shape)} for {num_tokens} tokens"
    for name, ids in (("tokens", datum.tokens), ("target_tokens", targets)):
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= info.vocab_size:
            return f"{name} must be integers from 0 to {info.vocab_size - 1}"
    return None
