from __future__ import annotations

import pytest
import torch

from backends.contract import AdapterSpec
from backends.lora.adapter import Adapter, LoRAPair
from backends.sampling.residency import AdapterResidency, adapter_bytes
from tests.unit.sampling.material import MakeEngine, prompt, request, result

SPEC = AdapterSpec(rank=1, alpha=1.0, seed=0, train_attn=True, train_mlp=False, train_unembed=False)


class Disk:
    def __init__(self) -> None:
        self.reads: list[str] = []

    def load(self, folder: str) -> Adapter:
        self.reads.append(folder)
        return Adapter.of(SPEC, {"q": LoRAPair(torch.zeros(1, 10), torch.zeros(10, 1))})


def test_adapters_are_read_once_and_the_least_used_leaves_first():
    disk = Disk()
    residency = AdapterResidency(disk.load, max_bytes=2 * 80)
    assert adapter_bytes(residency.get("a")) == 80
    first = residency.get("b")
    residency.get("a")
    residency.get("c")
    assert disk.reads == ["a", "b", "c"]
    assert "b" not in residency
    residency.get("a")
    assert residency.get("b") is not first
    assert disk.reads == ["a", "b", "c", "b"]


def test_one_adapter_larger_than_the_budget_still_works():
    residency = AdapterResidency(Disk().load, max_bytes=10)
    residency.get("a")
    residency.get("b")
    assert "b" in residency
    assert "a" not in residency


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_a_sample_never_fails_for_residency(make_engine: MakeEngine, adapters, budget):
    engine = make_engine(adapter_budget_bytes=budget)
    tokens = [
        result(engine, request("r", prompt(9), adapter=adapters[i])).sequences[0].tokens.tolist()
        for i in (0, 1, 0, 1)
    ]
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]
