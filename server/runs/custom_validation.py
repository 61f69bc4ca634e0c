"""Whether a request with a custom loss makes sense: it is the loss that says what it reads."""

from __future__ import annotations

from reprlib import repr as brief

import numpy as np

from backends.contract import CustomLoss, Datum, ForwardBackward, ModelInfo
from server.core.errors import BadInput
from server.runs.validation import check_forward_backward, check_target_tokens, check_tokens


def check_pass(request: ForwardBackward, info: ModelInfo) -> None:
    """Raise BadInput for the first thing that is wrong, whatever the loss."""
    if request.custom_loss is None:
        check_forward_backward(request, info)
        return
    if not request.data:
        raise BadInput("data: holds no datum; a request needs at least 1.")
    for index, datum in enumerate(request.data):
        check_tokens(f"data[{index}]", datum.tokens, info)
        _check_inputs(f"data[{index}].loss_fn_inputs", datum, request.custom_loss, info)


def _check_inputs(where: str, datum: Datum, loss: CustomLoss, info: ModelInfo) -> None:
    """Inputs that the loss does not read may be there too: the client sends its data whole."""
    logprobs, *others = loss.inputs
    targets = _input(where, datum, "target_tokens", logprobs.rank, loss)
    if len(targets) != len(datum.tokens) or not targets.size:
        raise BadInput(
            f"{where}['target_tokens']: has shape {list(targets.shape)}; "
            f"model_input has {len(datum.tokens)} tokens."
        )
    check_target_tokens(f"{where}['target_tokens']", targets, info)
    for declared in others:
        _input(where, datum, declared.name, declared.rank, loss)


def _input(where: str, datum: Datum, name: str, rank: int, loss: CustomLoss) -> np.ndarray:
    array = datum.loss_inputs.get(name)
    if array is None:
        raise BadInput(f"{where}: loss {brief(loss.name)} reads {name}, which is missing.")
    # A number travels as an array of one.
    if array.size != 1 if rank == 0 else array.ndim != rank:
        raise BadInput(
            f"{where}[{name!r}]: has shape {list(array.shape)}; "
            f"loss {brief(loss.name)} reads it with rank {rank}."
        )
    return array
