"""How a model is divided among processes."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from backends.model import UnsupportedModelError
from backends.training.megatron.qwen3_moe import expert_layers


@dataclass(frozen=True, slots=True)
class Parallel:
    """All ranks beyond these have a copy of the model each (data parallelism)."""

    tensor: int = 1
    """How many ranks share each layer."""
    pipeline: int = 1
    """How many ranks, or groups of `tensor` ranks, have some of the layers each."""
    expert: int = 1
    """How many ranks have some of a layer's experts each."""
    sequence: bool = False
    """Whether the ranks that share a layer share the tokens between layers too."""


def refuse_sizes(config: PretrainedConfig, parallel: Parallel) -> None:
    """Raises UnsupportedModelError for a model that cannot be divided so."""
    sparse = expert_layers(config)
    if any(sparse):
        _refuse_experts(config, parallel)
    elif parallel.expert > 1:
        raise UnsupportedModelError(f"{config.model_type}: there are no experts to divide")
    for size, name in (
        (parallel.tensor, "num_key_value_heads"),
        (parallel.tensor if not all(sparse) else 1, "intermediate_size"),
        (parallel.tensor if any(sparse) else 1, "moe_intermediate_size"),
        (parallel.tensor, "vocab_size"),
        (parallel.pipeline, "num_hidden_layers"),
        (parallel.expert, "num_experts"),
    ):
        if size == 1:
            continue
        value = getattr(config, name)
        if value % size:
            raise UnsupportedModelError(
                f"{config.model_type}: {name} = {value} cannot be divided among {size} ranks"
            )


def _refuse_experts(config: PretrainedConfig, parallel: Parallel) -> None:
    if parallel.tensor > 1 and not parallel.sequence:
        raise UnsupportedModelError(
            f"{config.model_type}: experts with tensor_parallel = {parallel.tensor} need "
            "sequence_parallel, without which each would see every token several times"
        )
    if config.num_experts_per_tok == 1 and config.norm_topk_prob:
        raise UnsupportedModelError(
            f"{config.model_type}: norm_topk_prob with num_experts_per_tok = 1 is not supported"
        )
