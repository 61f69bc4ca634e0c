"""A folder of an adapter on experts is what vLLM wants of one, down to the order of its stacks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file

from backends.lora.adapter import Adapter, LoRAPair, Target
from backends.lora.peft_folder import save_adapter
from tests.unit.backends.material import spec
from tests.vllm.material import PYTHON, ROOT

HIDDEN, INNER, NUM_EXPERTS, RANK = 16, 8, 4, 2


def targets() -> list[Target]:
    """With the names of the original model, as the trainer has them (tests/megatron)."""
    found = [
        Target(f"model.layers.0.self_attn.{name}_proj", "attn", HIDDEN, HIDDEN) for name in "qkvo"
    ]
    for expert in range(NUM_EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}"
        found += [Target(f"{name}.{side}_proj", "mlp", HIDDEN, INNER) for side in ("gate", "up")]
        found.append(Target(f"{name}.down_proj", "mlp", INNER, HIDDEN))
    return [*found, Target("lm_head", "unembed", HIDDEN, 32)]


def test_vllm_reads_the_experts_of_a_folder(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    pairs = {
        t.name: LoRAPair(
            torch.randn(RANK, t.in_features, generator=generator),
            torch.randn(t.out_features, RANK, generator=generator),
        )
        for t in targets()
    }
    save_adapter(Adapter.of(spec(rank=RANK), pairs), tmp_path / "adapter", "org/name")
    out = tmp_path / "read.safetensors"
    script, layer = ROOT / "tests/vllm/read_experts.py", "model.layers.0.mlp"
    subprocess.run(
        [PYTHON, script, tmp_path / "adapter", str(NUM_EXPERTS), layer, out],
        check=True,
        env=os.environ | {"VLLM_PLUGINS": "none", "CUDA_VISIBLE_DEVICES": ""},
    )
    scale = spec().alpha / RANK
    for name, read in load_file(out).items():
        projection, kind = name.split(".")
        of_experts = [
            getattr(pairs[f"{layer}.experts.{expert}.{projection}"], kind.lower())
            for expert in range(NUM_EXPERTS)
        ]
        torch.testing.assert_close(read, torch.stack(of_experts) * (scale if kind == "B" else 1))
