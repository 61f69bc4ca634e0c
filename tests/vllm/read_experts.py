"""Run by vLLM's Python: reads an adapter of a mixture of experts as a replica would, by vLLM's own
code, and writes what the experts of a layer would get. vLLM has no kernel on a CPU for the rest."""

from __future__ import annotations

import sys

from safetensors.torch import save_file
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM


def read(folder: str, num_experts: int, layer: str) -> PackedLoRALayerWeights:
    mapping = RoutedExperts.build_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", num_experts
    )
    of_experts = [name.rstrip(".") for _, name, _, _ in mapping]
    packed = [
        part for parts in Qwen3MoeForCausalLM.packed_modules_mapping.values() for part in parts
    ]
    expected = {*of_experts, "experts", *packed, "o_proj", "lm_head"}
    helper = PEFTHelper.from_local_dir(folder, max_position_embeddings=None)
    helper.validate_legal(LoRAConfig(max_lora_rank=16))
    model = LoRAModel.from_local_checkpoint(folder, expected, helper, lora_model_id=1, device="cpu")
    loras = [model.get_lora(f"{layer}.{name}") for name in of_experts]
    return PackedLoRALayerWeights.pack_moe(loras, f"{layer}.experts")


if __name__ == "__main__":
    folder, num_experts, layer, out = sys.argv[1:]
    weights = read(folder, int(num_experts), layer)
    tensors = {
        f"{name}.{kind}": tensor.contiguous()
        for kind, all_three in (("A", weights.lora_a), ("B", weights.optimize().lora_b))
        for name, tensor in zip(("gate_proj", "down_proj", "up_proj"), all_three, strict=True)
    }
    save_file(tensors, out)
