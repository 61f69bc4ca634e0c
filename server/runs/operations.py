"""A journaled training request as something to do: decoded when it arrives, and again from the
journal after a restart, by the same code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from backends.contract import ForwardBackward, OptimStep
from server.checkpoints.encryption import check_recipients
from server.core.errors import BadInput
from server.core.limits import check_ttl
from server.core.paths import CheckpointKind, CheckpointPath, check_name, parse_path
from server.core.records import Request, SamplerKind
from server.core.requests import Kind
from server.runs import wire
from server.runs.optimizers import chosen
from server.runs.validation import check_optim_step
from server.wire.json_shapes import parse_json
from server.wire.recorded import RECORDED_CONTENT_TYPE, body_of, restored
from server.wire.training import PROTOBUF_CONTENT_TYPE, decode_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Give the run a fresh adapter of its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    path: CheckpointPath
    optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Write weights under a name."""

    kind: CheckpointKind
    name: str
    ttl_seconds: int | None
    overwrite: bool
    user_metadata: dict[str, str]
    recipients: tuple[str, ...] = ()
    """Who alone shall be able to read the files, as age knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Make a sampling session of the weights as they are."""

    sampling_session_seq_id: int
    kind: SamplerKind


Operation = Create | Load | ForwardBackward | OptimStep | SaveCheckpoint | Publish


def decode(request: Request) -> Operation:
    """Raises BadInput where the body is not what its kind needs."""
    assert request.payload is not None
    if request.payload_type == RECORDED_CONTENT_TYPE:
        body = body_of(request.payload)
        decoded = decode_training(body, PROTOBUF_CONTENT_TYPE).request
        return restored(decoded, request.payload)
    return decode_body(request.kind, request.payload, request.payload_type)


def decode_body(kind: Kind, body: bytes, content_type: str) -> Operation:
    match kind:
        case Kind.CREATE:
            return Create()
        case Kind.LOAD:
            load = parse_json(wire.LoadWeights, body)
            chosen(load.optimizer_config)
            return Load(path=_training_path(load.path), optimizer=load.optimizer)
        case Kind.FORWARD | Kind.FORWARD_BACKWARD:
            return decode_training(body, content_type).request
        case Kind.OPTIM_STEP:
            return _optim_step(parse_json(wire.OptimStepBody, body))
        case Kind.SAVE:
            save = parse_json(wire.SaveWeights, body)
            return _save(CheckpointKind.TRAINING, save, overwrite=save.overwrite)
        case Kind.SAVE_FOR_SAMPLER:
            return _publish(parse_json(wire.SaveWeightsForSampler, body))
        case Kind.SAVE_EXTERNAL:
            external = parse_json(wire.SaveWeightsExternal, body)
            recipients = check_recipients(external.age_encryption_recipients)
            return replace(_save(CheckpointKind.EXTERNAL, external), recipients=recipients)
        case Kind.SAMPLE | Kind.CUSTOM_LOSS:
            raise AssertionError(f"{kind} is no run operation")


def _training_path(text: str) -> CheckpointPath:
    path = parse_path(text)
    if path.kind is not CheckpointKind.TRAINING:
        raise BadInput(
            f"path {text!r} is a {path.kind} checkpoint; loading a run needs a "
            f"{CheckpointKind.TRAINING} checkpoint, as save_state makes it"
        )
    return path


def _optim_step(body: wire.OptimStepBody) -> OptimStep:
    if body.optimizer_params is not None:
        kind = str(body.optimizer_params.get("type"))[:40]
        raise BadInput(f"optimizer_params.type is {kind!r}; this run's optimizer is adamw")
    params = body.adam_params or wire.AdamParams()
    step = OptimStep(run=body.model_id, **params.model_dump())
    check_optim_step(step)
    return step


def _save(kind: CheckpointKind, body: Any, *, overwrite: bool = False) -> SaveCheckpoint:
    return SaveCheckpoint(
        kind=kind,
        name=check_name(body.path),
        ttl_seconds=check_ttl(body.ttl_seconds),
        overwrite=overwrite,
        user_metadata=dict(getattr(body, "user_metadata", None) or {}),
    )


def _publish(body: wire.SaveWeightsForSampler) -> SaveCheckpoint | Publish:
    if body.path is not None:
        return _save(CheckpointKind.SAMPLER, body)
    if body.sampling_session_seq_id is None:
        raise BadInput("path and sampling_session_seq_id are both missing; one is needed")
    return Publish(
        sampling_session_seq_id=body.sampling_session_seq_id, kind=SamplerKind(body.kind)
    )
