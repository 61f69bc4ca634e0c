"""Adapters on disk, in the format of PEFT, with Hearth's own facts in a `hearth.json` beside.

`adapter_config.json` and `adapter_model.safetensors` are what `peft.PeftModel.from_pretrained`
and vLLM read. An adapter on the head of a model with tied embeddings is written with
`ensure_weight_tying` off: the head alone is adapted, never the input embedding. PEFT loads it
so, and warns that merging such an adapter would change both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.contract import AdapterSpec
from backends.lora.adapter import Adapter, LoRAPair, Target
from backends.lora.atomic_folder import new_folder, settled

_PREFIX = "base_model.model."
_PLAIN = {"bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
_PATTERNS = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")


class AdapterFolderError(Exception):
    """The folder holds no adapter for this base model; the message says what is wrong."""


def save_adapter(adapter: Adapter, directory: str | Path, base_model_name: str) -> None:
    """Write a PEFT folder that appears whole or not at all, in place of an existing one."""
    with new_folder(directory) as folder:
        write_adapter(adapter, folder, base_model_name)


def write_adapter(adapter: Adapter, folder: Path, base_model_name: str) -> None:
    """Write the files of an adapter into a folder that somebody else puts in place."""
    cpu = torch.device("cpu")
    tensors = {
        _PREFIX + name: tensor.contiguous() for name, tensor in adapter.to(cpu).named_tensors()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "adapter_config.json", _peft_config(adapter, base_model_name))
    _write_json(folder / "hearth.json", {"format": 1, "adapter": asdict(adapter.spec)})


def load_adapter(directory: str | Path, targets: Sequence[Target], device: torch.device) -> Adapter:
    """Read an adapter of Hearth's or of PEFT's own making as float32, for the base model whose
    layers `targets` lists. Raises AdapterFolderError."""
    folder = settled(directory)
    try:
        config = json.loads((folder / "adapter_config.json").read_bytes())
        facts = _own_facts(folder / "hearth.json")
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise AdapterFolderError(f"no adapter can be read from {folder}: {error}") from error
    _refuse_unsupported(config)
    pairs = _pairs(tensors, int(config["r"]), targets)
    return Adapter.of(facts or _spec_of_foreign(config, pairs, targets), pairs).to(device)


def _own_facts(path: Path) -> AdapterSpec | None:
    if not path.exists():
        return None
    return AdapterSpec(**json.loads(path.read_bytes())["adapter"])


def _peft_config(adapter: Adapter, base_model_name: str) -> dict[str, Any]:
    alpha = adapter.spec.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "r": adapter.spec.rank,
        # vLLM wants an integer here.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.pairs}),
        "modules_to_save": None,
        **_PLAIN,
    }


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA" or "r" not in config:
        raise AdapterFolderError("adapter_config.json describes no LoRA adapter")
    for key, plain in _PLAIN.items():
        if config.get(key, plain) != plain:
            raise AdapterFolderError(f"{key} = {config[key]!r} is not supported, only {plain!r}")
    for key in _PATTERNS:
        if config.get(key):
            raise AdapterFolderError(f"{key} is not supported")


def _pairs(tensors: dict[str, Tensor], rank: int, targets: Sequence[Target]) -> dict[str, LoRAPair]:
    """Take the tensors of each target, in the order of `targets`; none may be left over."""
    left = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    pairs = {}
    for target in targets:
        a, b = (left.pop(f"{target.name}.lora_{matrix}.weight", None) for matrix in "AB")
        if a is None and b is None:
            continue
        shapes = ((rank, target.in_features), (target.out_features, rank))
        if a is None or b is None or (tuple(a.shape), tuple(b.shape)) != shapes:
            raise AdapterFolderError(f"{target.name}: lora_A and lora_B must have shapes {shapes}")
        pairs[target.name] = LoRAPair(a.float(), b.float())
    if left or not pairs:
        raise AdapterFolderError(f"tensors for none of this model's layers: {sorted(left)[:3]}")
    return pairs


def _spec_of_foreign(
    config: dict[str, Any], pairs: dict[str, LoRAPair], targets: Sequence[Target]
) -> AdapterSpec:
    groups = {target.group for target in targets if target.name in pairs}
    return AdapterSpec(
        rank=int(config["r"]),
        alpha=float(config.get("lora_alpha", 8)),
        seed=0,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
