"""The JSON bodies of training requests, as the SDK sends them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.wire.json_shapes import Numbers, WireModel
from server.wire.training import MAX_SEQ_ID


class LoraConfig(WireModel):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(WireModel):
    type: str = "adamw"
    version: int | None = None


class CreateModel(WireModel):
    session_id: str
    model_seq_id: int = Field(ge=0, le=MAX_SEQ_ID)
    base_model: str
    lora_config: LoraConfig = LoraConfig()
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeights(WireModel):
    """Either form: with `session_id` it creates a run, with `model_id` it changes one."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MAX_SEQ_ID)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)


class RunRequest(WireModel):
    """What every request on an existing run has."""

    model_id: str
    seq_id: int = Field(ge=1, le=MAX_SEQ_ID)


class AdamParams(Numbers):
    """The documented defaults: older SDKs send only what the user set."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(RunRequest):
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(RunRequest):
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(RunRequest):
    """With `path` a named checkpoint, without one a sampler that only this session has."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=MAX_SEQ_ID)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(RunRequest):
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
