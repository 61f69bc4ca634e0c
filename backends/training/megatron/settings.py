"""What Megatron-Bridge's provider of a model is told, whatever the model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from backends.training.megatron.parallel import Parallel

RouterDtype = Literal["float32", "model"]
"""What the router of experts computes in."""

_SETTINGS = {
    "perform_initialization": False,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    # No loss for balance: the router is frozen.
    "moe_router_load_balancing_type": "none",
    # Losses are sums: this way the pipeline does not divide them.
    "calculate_per_token_loss": True,
    "deallocate_pipeline_outputs": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # Fused kernels are TransformerEngine's and Apex's, or torch's compiler's; none is needed.
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    # The model is in one dtype, so nothing is cast on the way.
    "autocast_dtype": None,
    "enable_autocast": False,
    "bf16": False,
    "fp16": False,
}


def settings(parallel: Parallel, dtype: torch.dtype, router: RouterDtype) -> dict[str, Any]:
    """By the names of its fields."""
    return {
        **_SETTINGS,
        "moe_router_dtype": "fp32" if router == "float32" else None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.tensor,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
