"""What a rank of several holds, by arithmetic on the matrices' sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.planning.layouts import Sizes, adapter_numbers, base_parameters, possible, stages
from server.planning.linears import GROUPS
from server.planning.shapes import ModelShape
from tests.unit.planning.configs import ALL, LLAMA_31_8B, QWEN3_4B, QWEN3_30B_A3B, SMOLLM2_135M

LLAMA = ModelShape.of(LLAMA_31_8B)
MOE = ModelShape.of(QWEN3_30B_A3B)
RANK = 16


def test_an_adapter_has_an_a_and_a_b_for_every_linear_layer():
    # q and o 4096 x 4096, k and v 4096 x 1024, gate, up and down 4096 x 14336, head 4096 x 128256.
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    mlp = 3 * (4096 + 14336)
    assert adapter_numbers(LLAMA, RANK, ["attn"]) == RANK * 32 * attention
    assert adapter_numbers(LLAMA, RANK, ["mlp"]) == RANK * 32 * mlp
    assert adapter_numbers(LLAMA, RANK, ["unembed"]) == RANK * (4096 + 128256)
    assert adapter_numbers(MOE, RANK, ["mlp"]) == RANK * 48 * 128 * 3 * (2048 + 768)


def test_tensor_parallel_splits_b_of_column_layers_and_a_of_row_layers():
    [stage] = stages(LLAMA, Sizes(tensor=4))
    column = (4096 + 4096 // 4) + 2 * (4096 + 1024 // 4) + 2 * (4096 + 14336 // 4)
    row = (4096 // 4 + 4096) + (14336 // 4 + 4096)
    layers = RANK * 32 * (column + row)
    assert adapter_numbers(LLAMA, RANK, ["attn", "mlp"], stage) == layers
    head = RANK * (4096 + 128256 // 4)
    assert adapter_numbers(LLAMA, RANK, GROUPS, stage) == layers + head


def test_tensor_parallel_splits_the_base_but_for_its_norms():
    [stage] = stages(LLAMA, Sizes(tensor=4))
    norms = (2 * 32 + 1) * 4096
    assert base_parameters(LLAMA, stage) - norms == (base_parameters(LLAMA) - norms) // 4


def test_expert_parallel_splits_experts_and_nothing_else():
    [stage] = stages(MOE, Sizes(data=4, expert=4))
    experts = 48 * 128 * 3 * 2048 * 768
    assert base_parameters(MOE, stage) == base_parameters(MOE) - 3 * experts // 4
    whole, share = (adapter_numbers(MOE, RANK, ["mlp"], s) for s in (None, stage))
    assert share == whole // 4
    assert adapter_numbers(MOE, RANK, ["attn"], stage) == adapter_numbers(MOE, RANK, ["attn"])


@pytest.mark.parametrize("name", ALL)
@given(pipeline=st.sampled_from([1, 2, 3, 6]))
def test_the_stages_of_a_pipeline_are_the_model(name: str, pipeline: int):
    shape = ModelShape.of(ALL[name])
    if shape.num_layers % pipeline:
        return
    each = stages(shape, Sizes(pipeline=pipeline))
    again = shape.vocab_size * shape.hidden_size if shape.tied and pipeline > 1 else 0
    assert sum(base_parameters(shape, s) for s in each) == base_parameters(shape) + again
    adapters = sum(adapter_numbers(shape, RANK, GROUPS, s) for s in each)
    assert adapters == adapter_numbers(shape, RANK, GROUPS)


@pytest.mark.parametrize(
    ("shape", "sizes", "words"),
    [
        (LLAMA, Sizes(tensor=3), "num_attention_heads 32 is not a multiple of 3"),
        (MOE, Sizes(tensor=8), "num_key_value_heads 4 is not a multiple of 8"),
        (LLAMA, Sizes(pipeline=5), "num_hidden_layers 32 is not a multiple of 5"),
        (LLAMA, Sizes(data=2, expert=2), "num_experts 1 is not a multiple of 2"),
        (MOE, Sizes(data=3, expert=3), "num_experts 128 is not a multiple of 3"),
        (MOE, Sizes(data=2, expert=4), "the data-parallel size 2 is not a multiple of 4"),
        (
            ModelShape.of({**QWEN3_4B, "num_key_value_heads": 32}),
            Sizes(tensor=16),
            "tensor parallel 16 is more than the 8 GPUs of a node",
        ),
    ],
)
def test_what_a_model_cannot_be_cut_into_is_told(shape: ModelShape, sizes: Sizes, words: str):
    assert sizes.refusal(shape) == words


def test_what_it_can_be_cut_into_is_not_refused():
    assert Sizes(tensor=8, pipeline=4, data=2).refusal(LLAMA) is None
    assert Sizes(tensor=4, data=8, expert=8).refusal(MOE) is None


def test_all_layouts_use_all_gpus_and_are_possible():
    found = possible(MOE, 8)
    assert Sizes(data=8, expert=8) == found[0]
    assert len(found) == len(set(found))
    assert {sizes.world for sizes in found} == {8}
    assert max(sizes.tensor for sizes in found) == 4  # it has 4 key-value heads
    dense = possible(ModelShape.of(SMOLLM2_135M), 2)  # 9 heads, 30 layers
    assert dense == [Sizes(data=2), Sizes(pipeline=2)]
