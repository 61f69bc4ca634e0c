"""Every knob, in one tree: defaults here, then hearth.toml, then HEARTH_* variables, then flags.

Nothing else in the service reads the environment.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

TOML_FILE = "hearth.toml"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="HEARTH_",
        toml_file=TOML_FILE,
        extra="forbid",
        use_attribute_docstrings=True,
        frozen=True,
    )

    models: dict[str, Path] = Field(default_factory=dict)
    """Public name (org/name) of each base model, and the folder that holds it."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs API keys."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""

    data: Path = Path("hearth-data")
    """Folder for everything the server keeps: database, checkpoints, logs."""

    database_url: str | None = None
    """SQLAlchemy URL; the default is SQLite (WAL) in the data folder."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen base model. Adapters and optimizer state are always float32."""

    trainer_groups: int = Field(default=1, ge=1, le=64)
    """Trainers of each base model: every run is with one of them at a time."""

    device: str = "auto"
    """Where base models compute: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if torch finds one."""

    trainer_devices: tuple[str, ...] = ()
    """Which GPUs each trainer group runs on, in the order of the base models and their groups:
    CUDA_VISIBLE_DEVICES of each, as "0" or "0,1,2,3"."""

    device_run_bytes: int | None = Field(default=None, ge=2**20)
    """How much of a GPU the adapters, gradients and moments of runs may take; those idle longest
    wait in host memory. Unset, they move when the GPU's memory runs out."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of each worker; 0 takes every core, and divides them among trainer groups."""

    max_tokens_per_microbatch: int = Field(default=1024, ge=16)
    """Tokens that go through the model at once: bounds memory, and how long sampling waits."""

    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep only the inputs of layers for backward and compute the layers again: much less memory,
    about a third more time. `auto` does so when a microbatch would not fit otherwise."""

    trainer: Literal["local", "fsdp", "megatron"] = "local"
    """What trains: one process; or a group of ranks that divide the base model (fsdp), or every
    layer of it (megatron), among them."""

    trainer_world_size: int = Field(default=1, ge=1, le=1024)
    """Ranks of each base model's group, each with a GPU of its own where there are GPUs."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Megatron: how many ranks divide each layer. What is left of the world is data parallel."""

    pipeline_parallel: int = Field(default=1, ge=1)
    """Megatron: how many stages the layers are divided into."""

    expert_parallel: int = Field(default=1, ge=1)
    """Megatron: how many ranks divide the experts of a layer."""

    sequence_parallel: bool = False
    """Megatron: tensor parallel ranks also divide the activations between their layers."""

    moe_router_dtype: Literal["float32", "model"] = "float32"
    """Megatron: what the router of a mixture of experts computes in; `model` is `dtype`."""

    ray: str | None = None
    """Where Ray hosts the ranks: HOST:PORT of a cluster, `auto` for the one this machine is in,
    `local` for one of our own. Unset, they are processes of this machine."""

    trainer_python: Path = Field(default_factory=lambda: _python_of(".venv-megatron"))
    """Python of the environment that Megatron is installed in; by default that of `.venv-megatron`
    in the working directory, where there is one, else the one that runs this."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """What samples: the trainer's own copy of the weights (beside a group, a worker with one), or
    vLLM servers beside it."""

    engine_replicas: int = Field(default=1, ge=1, le=64)
    """vLLM servers that are started for each base model."""

    engine_urls: tuple[str, ...] = ()
    """vLLM servers of the one base model, started by somebody else, who must let them read the
    data folder. They are used instead of own ones (see backends/README.md)."""

    engine_python: Path = Field(default_factory=lambda: _python_of(".venv-vllm"))
    """Python of the environment that vLLM is installed in; by default that of `.venv-vllm` in the
    working directory, where there is one, else the one that runs this."""

    engine_max_num_seqs: int = Field(default_factory=lambda: 256 if has_gpu() else 32, ge=1)
    """Sequences that one vLLM generates at once; by default 256 on a GPU and 32 on a CPU."""

    engine_max_loras: int = Field(default=4, ge=1)
    """Adapters that one vLLM has in a batch at once."""

    engine_max_cpu_loras: int = Field(default=16, ge=1)
    """Adapters that one vLLM keeps in memory; others are loaded when they are asked for."""

    engine_max_lora_rank: int = Field(default=64, ge=1, le=512)
    """Largest rank that vLLM can take: memory is set aside for it. Larger runs are refused."""

    engine_devices: tuple[str, ...] = ()
    """Which GPUs each vLLM server runs on, in the order of the servers: CUDA_VISIBLE_DEVICES of
    each, as "4" or "4,5"; it is spread over those that are named (tensor parallel)."""

    engine_gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that a vLLM takes, where it is not alone there. By default vLLM's
    own, 0.92; with engine_kv_cache_bytes it only has to be free at the start."""

    engine_kv_cache_bytes: int | None = Field(
        default_factory=lambda: None if has_gpu() else 2**30, ge=2**20
    )
    """Memory for keys and values of each vLLM. By default 1 GiB on a CPU, and on a GPU what vLLM
    itself takes, which is most of it."""

    tick_token_budget: int = Field(default=512, ge=16)
    """Tokens chosen for one pass, from all tenants together, for each microbatch that a trainer has
    at once (its ranks, over tensor_parallel). A small request waits for the pass under way and
    shares the next: at half a microbatch, for a microbatch beside its own share."""

    max_context_length: int | None = Field(default=None, ge=16)
    """Longest sequence accepted, where the model itself would allow more."""

    lora_alpha: float | None = Field(default=None, gt=0)
    """The update is alpha / rank * B A; unset, alpha is the rank (see backends/README.md)."""

    long_poll_s: float = Field(default=20.0, gt=0, le=40)
    """How long retrieve_future is held before it answers "try again"."""

    gap_wait_s: float = Field(default=5.0, ge=0)
    """How long a missing seq_id is waited for after the last request of its run arrived."""

    snapshot_after_s: float = Field(default=30.0, gt=0)
    """A run's state is saved once this much computing would have to be repeated after a crash."""

    session_timeout_s: float = Field(default=3600.0, ge=60)
    """A session without a heartbeat for this long is over."""

    result_ttl_s: float = Field(default=86400.0, ge=600)
    """How long results can be asked for again."""

    drain_grace_s: float = Field(default=30.0, ge=0)
    """On shutdown: how long running work may take to finish."""

    max_body_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Largest request body, before and after decompression."""

    body_timeout_s: float = Field(default=60.0, gt=0)
    """How long a client may take for the headers of a request, and how long its body may stand
    still, before the connection is given up."""

    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Share of the computing that a tenant gets when others want it too; 1 where none is given."""

    run_memory_bytes: int = Field(default_factory=lambda: _machine_memory() // 2, ge=2**20)
    """Memory for adapters, gradients and optimizer states, an equal part for each trainer group,
    whose ranks count together; of what is more, the runs that were idle longest go to disk until
    they are asked for. By default half of the machine's."""

    max_waiting_training_bytes: int = Field(default=2**30, ge=1)
    """Training data one tenant may have waiting; whoever sends more is told to come back (429)."""

    max_waiting_samples: int = Field(default=4096, ge=1)
    """Samples one tenant may have waiting; more are told to come back (429)."""

    max_running_samples: int | None = Field(default=None, ge=1)
    """Samples of one base model that are with its engine at once; the others wait until it is
    their tenant's turn. By default twice as many as the engine generates at once."""

    inflight_swap: Literal["keep", "wait", "abort"] = "keep"
    """What samples under way do when in-flight weights are saved anew: go on with the new ones
    (keep), finish with those they have (wait), or start again from their prompt (abort)."""

    stable_reinforce: Literal["closest", "refuse"] = "closest"
    """The vendor's objective of this name is not published: compute the closest one that is (see
    backends/README.md), or refuse the loss."""

    jwt: bool = True
    """Have clients exchange their API key for a token that tells them who they are (`whoami`)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the server logs."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def _python_of(environment: str) -> Path:
    python = Path(environment, "bin", "python").absolute()
    return python if python.exists() else Path(sys.executable)


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
