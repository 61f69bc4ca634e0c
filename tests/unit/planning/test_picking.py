"""What is picked fits and can be started; and what is picked for machines that people have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.planning import engine, memory
from server.planning.activations import PassShape
from server.planning.engine import Serving
from server.planning.layouts import Sizes
from server.planning.memory import Workload
from server.planning.picking import Machine, Placement, Task, choose, microbatch
from server.planning.report import recommendation
from server.planning.shapes import ModelShape, PlanRefused
from tests.unit.planning.configs import (
    ALL,
    LLAMA_31_8B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
)

GIB = 2**30
GROUPS = ("attn", "mlp", "unembed")


def task(config: dict, gpus: int, *, runs: int = 8, rank: int = 32, gib: float = 139) -> Task:
    shape = ModelShape.of(config)
    return Task(
        shape=shape,
        workload=Workload(runs=runs, made=PassShape(dtype_bytes=2, rank=rank, groups=GROUPS)),
        serving=Serving(loras=4, lora_rank=rank, context=shape.max_context_length),
        machine=Machine(gpus=gpus, gpu_bytes=gib * GIB),
    )


def placements(one: Task) -> dict[str, Placement]:
    outcomes, _ = choose(one)
    return {name: p for name, p in outcomes.items() if isinstance(p, Placement)}


@given(
    name=st.sampled_from(sorted(ALL)),
    gpus=st.integers(1, 12),
    gib=st.sampled_from([16, 24, 79, 139]),
    runs=st.integers(1, 64),
    rank=st.sampled_from([1, 8, 32, 128]),
)
def test_whatever_is_picked_fits_and_can_be_cut_so(name, gpus, gib, runs, rank):
    one = task(ALL[name], gpus, runs=runs, rank=rank, gib=gib)
    for backend, placed in placements(one).items():
        trainer = placed.trainer
        assert trainer.backend == backend
        assert trainer.sizes.refusal(one.shape) is None
        assert trainer.total(placed.tokens, recompute=placed.recompute) <= placed.available
        used = trainer.sizes.world
        if placed.replica is not None:
            assert placed.replica.least <= placed.share * one.machine.gpu_bytes
            used += 0 if placed.shared else placed.replicas * placed.replica.gpus
            assert placed.replicas >= 1
        assert used <= gpus
        if placed.shared:
            assert placed.available + placed.share * one.machine.gpu_bytes <= gib * GIB


@given(tokens=st.sampled_from([1024, 8192]), gib=st.integers(1, 200))
def test_activations_are_kept_where_the_trainer_itself_would_keep_them(tokens, gib):
    one = task(QWEN3_8B, 1)
    trainer = memory.local(one.shape, one.workload)
    fit = microbatch(trainer, gib * GIB)
    if fit is not None and not fit[1]:
        assert fit[0] * trainer.kept_token <= (gib * GIB - trainer.held) / 2


@pytest.mark.parametrize("config", [QWEN3_4B, QWEN3_8B], ids=["4B", "8B"])
def test_one_gpu_is_shared_by_the_local_trainer_and_vllm(config):
    one = task(config, 1)
    outcomes, best = choose(one)
    assert best == "local"
    placed = outcomes["local"]
    assert isinstance(placed, Placement)
    assert placed.shared
    words = recommendation("M", one, placed)
    assert "--trainer local --engine vllm --replicas 1" in words
    assert f"engine_gpu_memory_utilization = {placed.share}" in words
    assert "devices" not in words


def test_a_mixture_of_experts_on_eight_gpus_is_spread_over_four_beside_four_replicas():
    one = task(QWEN3_30B_A3B, 8)
    outcomes, best = choose(one)
    assert best == "megatron"
    placed = outcomes["megatron"]
    assert isinstance(placed, Placement)
    assert placed.trainer.sizes == Sizes(data=4, expert=4)
    words = recommendation("M", one, placed)
    assert "--trainer megatron --world-size 4 --expert-parallel 4" in words
    assert 'trainer_devices = ["0,1,2,3"], engine_devices = ["4", "5", "6", "7"]' in words
    for name in ("local", "fsdp"):
        assert "mixture-of-experts models need the Megatron backend" in str(outcomes[name])


def test_a_dense_model_on_eight_gpus_is_trained_data_parallel():
    one = task(LLAMA_31_8B, 8)
    outcomes, best = choose(one)
    assert best == "fsdp"
    placed = outcomes["fsdp"]
    assert isinstance(placed, Placement)
    assert placed.trainer.sizes == Sizes(data=4)
    assert f"tick_token_budget = {placed.tokens}" in recommendation("M", one, placed)


def test_a_base_that_no_gpu_holds_is_cut():
    large = {
        **LLAMA_31_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
    }
    one = task({**large, "num_attention_heads": 64}, 8, runs=2)
    found = placements(one)
    assert "local" not in found
    assert found["megatron"].trainer.sizes.tensor * found["megatron"].trainer.sizes.pipeline > 1
    assert found["fsdp"].trainer.base < memory.local(one.shape, one.workload).base / 3
    replica = found["fsdp"].replica
    assert replica is not None
    assert replica.gpus == 2  # its own weights are 131 GiB


def test_without_room_for_vllm_the_local_trainer_samples():
    outcomes, best = choose(task(QWEN3_4B, 1, runs=1, gib=30))
    assert best == "local"
    placed = outcomes["local"]
    assert isinstance(placed, Placement)
    assert placed.replica is None


@pytest.mark.parametrize("gpus", [1, 2])
def test_trainers_of_several_ranks_are_not_for_one_gpu(gpus: int):
    outcomes, best = choose(task(QWEN3_4B, gpus))
    assert best == "local"
    for name in ("fsdp", "megatron"):
        assert "with one GPU for the trainer it is the local backend" in str(outcomes[name])


def test_what_fits_nowhere_is_refused_with_numbers():
    outcomes, best = choose(task(QWEN3_30B_A3B, 2))
    assert best is None
    refused = outcomes["megatron"]
    assert isinstance(refused, PlanRefused)
    assert "8 runs of rank 32 would take" in str(refused)
    assert "2 GPUs of 139.0 GiB cannot hold both" in str(refused)


def test_a_replica_holds_weights_slots_and_the_longest_sequence():
    one = task(LLAMA_31_8B, 1)
    replica = engine.replica(one.shape, one.serving, 2, 1)
    assert replica.base == 2 * 8_030_261_248
    # Keys and values: 32 layers, 8 heads of 128, 2 bytes each.
    assert replica.kv_token == 2 * 32 * 8 * 128 * 2
    rest = replica.least - replica.base - replica.lora_slots - engine.WORKSPACE_BYTES
    assert rest == 131072 * replica.kv_token
    assert replica.kv_tokens(replica.least) == 131072
    assert replica.kv_tokens(0) == 0
