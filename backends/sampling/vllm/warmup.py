"""An adapter that does nothing, to warm a replica up with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def write_idle_adapter(model: Path, folder: Path) -> Path:
    """A PEFT folder for the model in `model`: rank 1 on one layer, all zero. Gives `folder`."""
    config = json.loads((model / "config.json").read_bytes())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    out = heads * (config.get("head_dim") or hidden // heads)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{_LAYER}.lora_A.weight": np.zeros((1, hidden), np.float32),
        f"{_LAYER}.lora_B.weight": np.zeros((out, 1), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
