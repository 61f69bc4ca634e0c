"""Whether a training request makes sense, decided before it costs anything.

Shapes: N positions of a datum, K targets a position.
"""

from __future__ import annotations

import math
from reprlib import repr as brief

import numpy as np

from backends.contract import (
    AdapterSpec,
    Datum,
    ForwardBackward,
    LossSignature,
    ModelInfo,
    OptimStep,
)
from server.core.errors import BadInput
from server.wire.checks import check_token_ids, first_position, shown
from server.wire.tensors import MAX_TARGETS

MAX_RANK = 256


def check_forward_backward(request: ForwardBackward, info: ModelInfo) -> None:
    """Raise BadInput for the first thing that is wrong."""
    if not request.data:
        raise BadInput("data: holds no datum; a request needs at least 1.")
    signature = info.losses.get(request.loss)
    if signature is None:
        known = ", ".join(sorted(info.losses))
        raise BadInput(f"loss_fn: {brief(request.loss)} is not known; known are {known}.")
    _check_config(request, signature)
    for index, datum in enumerate(request.data):
        check_tokens(f"data[{index}]", datum.tokens, info)
        _check_names(f"data[{index}]", datum, request.loss, signature)
        _check_inputs(f"data[{index}]", datum, request.loss, signature, info)


def _check_config(request: ForwardBackward, signature: LossSignature) -> None:
    for name, value in request.loss_config.items():
        where = f"loss_fn_config[{brief(name)}]"
        if name not in signature.config:
            known = ", ".join(signature.config) or "nothing"
            raise BadInput(f"{where}: is not known to {request.loss}, which takes {known}.")
        if isinstance(value, str) or not math.isfinite(value):
            raise BadInput(f"{where}: is {brief(value)}; it must be a finite number.")
    low = request.loss_config.get("clip_low_threshold", -math.inf)
    high = request.loss_config.get("clip_high_threshold", math.inf)
    if float(low) > float(high):
        raise BadInput(
            f"loss_fn_config: clip_low_threshold is {low}, above clip_high_threshold, {high}."
        )


def check_tokens(where: str, tokens: np.ndarray, info: ModelInfo) -> None:
    length, limit = len(tokens), info.max_context_length
    if length == 0:
        raise BadInput(f"{where}.model_input: holds no token; a datum needs at least 1.")
    if length > limit:
        raise BadInput(f"{where}.model_input: holds {length} tokens; the limit is {limit}.")
    check_token_ids(f"{where}.model_input", tokens, vocab_size=info.vocab_size)


def _check_names(where: str, datum: Datum, loss: str, signature: LossSignature) -> None:
    for name in signature.required:
        if name not in datum.loss_inputs:
            raise BadInput(f"{where}.loss_fn_inputs: {loss} needs {name}, which is missing.")
    known = signature.required + signature.optional
    for name in datum.loss_inputs:
        if name not in known:
            raise BadInput(
                f"{where}.loss_fn_inputs: {brief(name)} is not known to {loss}, "
                f"which reads {', '.join(known)}."
            )


def _check_inputs(
    where: str, datum: Datum, loss: str, signature: LossSignature, info: ModelInfo
) -> None:
    length = len(datum.tokens)
    # The targets come first, since the rest must have their shape.
    names = sorted(datum.loss_inputs, key=lambda name: name != "target_tokens")
    shape: tuple[int, ...] | None = None
    for name in names:
        array, place = datum.loss_inputs[name], f"{where}.loss_fn_inputs[{brief(name)}]"
        _check_length(place, array, length)
        _check_targets_per_position(place, array, loss, signature)
        shape = shape or array.shape
        if array.shape != shape:
            raise BadInput(
                f"{place}: has shape {list(array.shape)}; {names[0]} has {list(shape)} "
                f"and they must agree."
            )
        if name == "target_tokens":
            check_target_tokens(place, array, info)
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            position = first_position(~np.isfinite(array))
            raise BadInput(
                f"{place}: is {array[position]} at position {shown(position)}; "
                f"it must be a finite number."
            )


def _check_length(where: str, array: np.ndarray, length: int) -> None:
    if array.ndim not in (1, 2):
        raise BadInput(f"{where}: has {array.ndim} dimensions; it may have 1 or 2.")
    if len(array) != length:
        raise BadInput(f"{where}: has length {len(array)}; model_input has {length} tokens.")


def _check_targets_per_position(
    where: str, array: np.ndarray, loss: str, signature: LossSignature
) -> None:
    if array.ndim == 1:
        return
    if not signature.many_targets:
        raise BadInput(f"{where}: has shape {list(array.shape)}; {loss} takes [{len(array)}] only.")
    if not 1 <= array.shape[1] <= MAX_TARGETS:
        raise BadInput(
            f"{where}: has {array.shape[1]} targets a position; it may have 1 to {MAX_TARGETS}."
        )


def check_target_tokens(where: str, array: np.ndarray, info: ModelInfo) -> None:
    if array.dtype.kind != "i":
        raise BadInput(f"{where}: is {array.dtype.name}; token ids are integers.")
    check_token_ids(where, array, vocab_size=info.vocab_size)


def check_optim_step(step: OptimStep) -> None:
    """Raise BadInput for the first hyperparameter that AdamW cannot take."""
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(step, name)
        if not (math.isfinite(value) and value >= 0):
            raise BadInput(f"adam_params.{name}: is {value}; it must be finite and at least 0.")
    for name in ("beta1", "beta2"):
        value = getattr(step, name)
        if not 0 <= value < 1:
            raise BadInput(f"adam_params.{name}: is {value}; it must be at least 0 and below 1.")


def check_adapter_spec(spec: AdapterSpec, info: ModelInfo) -> None:
    """Raise BadInput when the base model cannot have such an adapter."""
    if not 1 <= spec.rank <= MAX_RANK:
        raise BadInput(f"lora_config.rank: is {spec.rank}; it must be from 1 to {MAX_RANK}.")
    if info.max_lora_rank is not None and spec.rank > info.max_lora_rank:
        raise BadInput(
            f"lora_config.rank: is {spec.rank}; what samples here takes "
            f"{info.max_lora_rank} at most."
        )
    if not (math.isfinite(spec.alpha) and spec.alpha > 0):
        raise BadInput(f"lora_config.alpha: is {spec.alpha}; it must be finite and above 0.")
    flags = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    if not any(flags.values()):
        raise BadInput(
            "lora_config: train_attn, train_mlp and train_unembed are all false; "
            "at least one must be true."
        )
    for group, wanted in flags.items():
        if wanted and group not in info.trainable_groups:
            raise BadInput(
                f"lora_config.train_{group}: is true; this base model can train "
                f"{', '.join(info.trainable_groups)} only."
            )
