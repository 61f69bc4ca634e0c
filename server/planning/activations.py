"""What a token of a microbatch keeps for backward, counted tensor by tensor.

The counts are those of `backends/training/activations.py`, which measures them: each autograd
function of a layer and what it saves. Tensors that two functions save are there once.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.planning import linears
from server.planning.layouts import Sizes, Stage
from server.planning.shapes import ModelShape

_FLOAT = 4

HEAD_CHUNK_BYTES = 32 << 20
"""Float32 logits of a chunk (`backends/lora/head.py`)."""

WORKING_SHARE = {False: 0.5, True: 0.3}
"""Of the activations of a layer, what its backward makes beside them, when all layers were kept
and when this one was computed again. With these, passes of Llama and Qwen3 on a CPU took 0.85 to
0.99 of what is reckoned, in float32 and bfloat16."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers that one token keeps, in the model's dtype and in float32."""

    low: float = 0.0
    full: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.low + other.low, self.full + other.full)

    def num_bytes(self, dtype_bytes: int) -> float:
        return self.low * dtype_bytes + self.full * _FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What a pass is made with; `rank` and `groups` are those of its adapters."""

    dtype_bytes: int
    rank: int
    groups: tuple[str, ...]


def of_layer(shape: ModelShape, layer: int, made: PassShape, sizes: Sizes | None = None) -> float:
    """Bytes a token of one layer on one rank. Tensor parallel splits what is between a column
    layer and the row layer behind it; what is between those blocks is whole on every rank."""
    sizes = sizes or Sizes()
    block = _experts(shape) if layer in shape.expert_layers else _mlp(shape)
    split = _attention(shape) + block
    # Norms work in float32 and keep their input so, and one scale; q, k, v (gate, up) share one.
    whole = Kept(low=2 * shape.hidden_size, full=2 * (shape.hidden_size + 1))
    adapters = Kept(low=_low_rank(shape, layer, made))
    parts = split.num_bytes(made.dtype_bytes) / sizes.tensor
    return parts + (whole + adapters).num_bytes(made.dtype_bytes)


def per_token(
    shape: ModelShape, made: PassShape, *, recompute: bool, stage: Stage | None = None
) -> float:
    """Bytes that a token keeps on one rank, of the whole model or of a stage."""
    layers = stage.layers if stage else range(shape.num_layers)
    rotations = Kept(low=2 * shape.head_dim)
    if recompute:
        last_norm = Kept(full=shape.hidden_size + 1)
        inputs = Kept(low=len(layers) * shape.hidden_size)
        return (rotations + last_norm + inputs).num_bytes(made.dtype_bytes)
    sizes = stage.sizes if stage else None
    kept = sum(of_layer(shape, layer, made, sizes) for layer in layers)
    # The last norm is not added: the first one, of embeddings that need no gradient, keeps nothing.
    return kept + rotations.num_bytes(made.dtype_bytes)


def working(shape: ModelShape, made: PassShape, *, recompute: bool, sizes: Sizes) -> float:
    """Bytes a token of what backward makes on its way through one layer, and of the layer itself
    where it is computed again."""
    largest = max(of_layer(shape, layer, made, sizes) for layer in shape.kinds_of_layer)
    return (recompute + WORKING_SHARE[recompute]) * largest


def logits_bytes(shape: ModelShape, made: PassShape) -> int:
    """A chunk of logits: in float32, in the model's dtype if that is another, and their product."""
    rows = max(1, HEAD_CHUNK_BYTES // (_FLOAT * shape.vocab_size))
    copies = _FLOAT + made.dtype_bytes + (made.dtype_bytes if made.dtype_bytes != _FLOAT else 0)
    return rows * shape.vocab_size * copies


def _attention(shape: ModelShape) -> Kept:
    """q, k, v, the output, and the logsumexp of each head."""
    query, kv = shape.query_size, shape.kv_size
    kept = Kept(low=2 * query + 2 * kv, full=shape.num_heads)
    if shape.qk_norm:
        kept += Kept(full=query + kv + shape.num_heads + shape.num_kv_heads)
    return kept


def _mlp(shape: ModelShape) -> Kept:
    """gate, silu(gate), up, and their product."""
    return Kept(low=4 * shape.intermediate_size)


def _experts(shape: ModelShape) -> Kept:
    """Of each expert that a token goes to: its input, the same four, its output; and the router."""
    assert shape.experts is not None
    each = 4 * shape.experts.width + 2 * shape.hidden_size
    return Kept(low=shape.experts.per_token * each, full=2 * shape.experts.count)


def _low_rank(shape: ModelShape, layer: int, made: PassShape) -> int:
    """A x of every linear layer that an adapter changes."""
    sparse = layer in shape.expert_layers
    per_token_experts = shape.experts.per_token if sparse and shape.experts else 1
    count = {"attn": len(linears.attention(shape)), "mlp": 3 * per_token_experts}
    return made.rank * sum(count.get(group, 0) for group in made.groups)
