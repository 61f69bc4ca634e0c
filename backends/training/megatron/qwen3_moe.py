"""Qwen3's mixture of experts: what Megatron-Bridge does not say of it."""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
from megatron.core.models.gpt import GPTModel
from transformers import PretrainedConfig, Qwen3MoeForCausalLM

MODEL_TYPE = "qwen3_moe"


@MegatronModelBridge.register_bridge(source=Qwen3MoeForCausalLM, target=GPTModel)
class WholeQwen3MoEBridge(Qwen3MoEBridge):
    """With layers that have one MLP in place of experts, and both ways to weigh experts."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config
        provider.moe_layer_freq = [int(sparse) for sparse in expert_layers(config)]
        # The weights of a token's experts add up to one only if they are normalized again.
        provider.moe_router_pre_softmax = not config.norm_topk_prob
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        mlp, original = "decoder.layers.*.mlp", "model.layers.*.mlp"
        return MegatronMappingRegistry(
            *super().mapping_registry().mappings,
            GatedMLPMapping(
                f"{mlp}.linear_fc1.weight",
                gate=f"{original}.gate_proj.weight",
                up=f"{original}.up_proj.weight",
            ),
            AutoMapping(f"{mlp}.linear_fc2.weight", f"{original}.down_proj.weight"),
        )


def expert_layers(config: PretrainedConfig) -> list[bool]:
    """Whether each layer of the model has experts; False throughout for one without any."""
    if config.model_type != MODEL_TYPE:
        return [False] * config.num_hidden_layers
    return [
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    ]
