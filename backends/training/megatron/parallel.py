"""How a model is divided among processes."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from backends.model import UnsupportedModelError


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
    if parallel.expert > 1:
        raise UnsupportedModelError(f"{config.model_type}: there are no experts to divide")
    for size, name in (
        (parallel.tensor, "num_key_value_heads"),
        (parallel.tensor, "intermediate_size"),
        (parallel.tensor, "vocab_size"),
        (parallel.pipeline, "num_hidden_layers"),
    ):
        value = getattr(config, name)
        if value % size:
            raise UnsupportedModelError(
                f"{config.model_type}: {name} = {value} cannot be divided among {size} ranks"
            )
