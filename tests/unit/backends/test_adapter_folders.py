from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from backends.batching.attention import PackedAttention
from backends.lora.atomic_folder import new_folder, settled
from backends.lora.head import logits_rows
from backends.lora.linear import Segment
from backends.lora.peft_folder import AdapterFolderError, load_adapter, save_adapter
from tests.unit.backends.material import spec, trained_adapter
from tests.unit.backends.oracle import peft_model, peft_warnings_expected

CPU = torch.device("cpu")


def _logits(model, adapter, tokens):
    segments = [Segment(0, len(tokens), adapter)]
    plan = PackedAttention([len(tokens)])
    with torch.no_grad():
        hidden = model.hidden(tokens, torch.arange(len(tokens)), segments, plan)
    return logits_rows(hidden, model.head_weight, segments)


@pytest.mark.parametrize("groups", ["attn mlp unembed", "attn", "unembed"])
def test_peft_loads_what_we_save_and_computes_the_same(model_path, load_model, tmp_path, groups):
    model = load_model(model_path)
    adapter = trained_adapter(model, spec(rank=3, groups=groups))
    save_adapter(adapter, tmp_path / "adapter", model.name)
    reference = peft_model(model_path, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        expected = reference(input_ids=tokens[None]).logits[0]
        untouched = base(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(
        _logits(model, adapter, tokens).double(), expected, rtol=0, atol=1e-4
    )
    assert (expected - untouched).abs().max() > 0.1
    assert torch.equal(reference.get_input_embeddings().weight, base.get_input_embeddings().weight)


def test_an_adapter_comes_back_bit_for_bit_with_its_spec(model_path, load_model, tmp_path):
    model = load_model(model_path)
    adapter = trained_adapter(model, spec(rank=5, seed=7))
    save_adapter(adapter, tmp_path / "adapter", model.name)
    again = load_adapter(tmp_path / "adapter", model.targets, CPU)
    assert again.spec == adapter.spec
    for (name, got), (expected_name, expected) in zip(
        again.named_tensors(), adapter.named_tensors(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(got, expected)


def test_an_adapter_made_by_peft_itself_loads(qwen3_path, load_model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(qwen3_path)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    with peft_warnings_expected():
        made = get_peft_model(base, config)
    made.save_pretrained(tmp_path / "adapter")
    model = load_model(qwen3_path)
    adapter = load_adapter(tmp_path / "adapter", model.targets, CPU)
    assert (adapter.spec.rank, adapter.spec.alpha) == (3, 5)
    assert (adapter.spec.train_attn, adapter.spec.train_unembed) == (True, False)
    tokens = torch.arange(20)
    with torch.no_grad():
        expected = made(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(_logits(model, adapter, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 9}, "must have shapes"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
    ],
)
def test_folders_we_cannot_honour_are_refused(llama_path, load_model, tmp_path, change, sentence):
    model = load_model(llama_path)
    save_adapter(trained_adapter(model, spec()), tmp_path / "adapter", model.name)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AdapterFolderError, match=sentence):
        load_adapter(tmp_path / "adapter", model.targets, CPU)


def test_an_adapter_of_another_model_is_refused(llama_path, qwen3_path, load_model, tmp_path):
    model = load_model(llama_path)
    save_adapter(trained_adapter(model, spec()), tmp_path / "adapter", model.name)
    with pytest.raises(AdapterFolderError, match="must have shapes"):
        load_adapter(tmp_path / "adapter", load_model(qwen3_path).targets, CPU)
    with pytest.raises(AdapterFolderError, match="none of this model"):
        load_adapter(tmp_path / "adapter", model.targets[:3], CPU)
    with pytest.raises(AdapterFolderError, match="no adapter can be read"):
        load_adapter(tmp_path / "missing", model.targets, CPU)


def test_a_failed_write_leaves_the_old_folder_and_nothing_else(tmp_path: Path):
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("old")

    def write_half() -> None:
        with new_folder(tmp_path / "a") as folder:
            (folder / "x").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_is_replaced_whole(tmp_path: Path):
    for text in ("old", "new"):
        with new_folder(tmp_path / "a") as folder:
            (folder / text).write_text(text)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_crash_between_the_two_renames_brings_the_old_folder_back(tmp_path: Path):
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("old")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert (settled(tmp_path / "a") / "x").read_text() == "old"


def test_a_crash_before_the_old_folder_was_removed_keeps_the_new_one(tmp_path: Path):
    for name, text in ((".a.replaced", "old"), ("a", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(text)
    assert (settled(tmp_path / "a") / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
