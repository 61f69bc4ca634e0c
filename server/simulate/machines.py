"""What a tick costs on a machine: straight lines in its tokens, adapters and optimizer steps."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from server.core.ids import RunId
from server.core.requests import PASS_KINDS, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Seconds, and what its users typically send. Ranks of several adapters add up."""

    description: str
    token_budget: int
    """Tokens of a tick, as `tick_token_budget` in the settings."""
    sequence_tokens: int
    """Median length of a sequence that people train on here."""
    pass_s: float
    """Of any pass, whatever is in it."""
    token_s: float
    """Of a token, forward and backward."""
    pass_rank_s: float
    """Of an adapter in a pass, for each of its ranks: its products and its gradient."""
    step_rank_s: float
    """Of an adapter's optimizer step, for each of its ranks."""
    rank_bytes: float = 0.0
    """What an adapter keeps on the device for each rank: weights, gradient, two moments."""
    adapter_bytes: float = math.inf
    """Device memory for all adapters together; what does not fit waits in host memory."""
    transfer_bytes_s: float = math.inf
    """Between host memory and the device, each way."""

    def seconds(self, kind: Kind, tokens: int, ranks: Iterable[int]) -> float:
        """Of one call; `ranks` are those of the adapters in it."""
        if kind in PASS_KINDS:
            return self.pass_s + self.token_s * tokens + self.pass_rank_s * sum(ranks)
        assert kind is Kind.OPTIM_STEP
        return self.step_rank_s * sum(ranks)

    def times(self, devices: int) -> Machine:
        """That many of these, each with its share of tokens and adapters. Every one of them reads
        the weights in every pass, so that part stays."""
        return replace(
            self,
            token_budget=self.token_budget * devices,
            token_s=self.token_s / devices,
            pass_rank_s=self.pass_rank_s / devices,
            step_rank_s=self.step_rank_s / devices,
            adapter_bytes=self.adapter_bytes * devices,
            transfer_bytes_s=self.transfer_bytes_s * devices,
        )


class Residency:
    """Which adapters lie on the device: those used last."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._bytes: OrderedDict[RunId, float] = OrderedDict()
        self._used = 0.0

    def bring(self, ranks: Mapping[RunId, int]) -> float:
        """Seconds until these runs are on the device. What makes room leaves meanwhile: the link
        carries both ways at once."""
        incoming = 0.0
        for run, rank in ranks.items():
            if run not in self._bytes:
                self._bytes[run] = size = rank * self._machine.rank_bytes
                incoming += size
            self._bytes.move_to_end(run)
        self._used += incoming
        while self._used > self._machine.adapter_bytes and len(self._bytes) > len(ranks):
            self._used -= self._bytes.popitem(last=False)[1]
        return incoming / self._machine.transfer_bytes_s


LAPTOP = Machine(
    description="one CPU core, SmolLM2-135M in float32, adapters on every layer",
    token_budget=512,
    sequence_tokens=64,
    # Measured: python -m tests.benchmarks.calibrate models/HuggingFaceTB/SmolLM2-135M-Instruct
    pass_s=0.126,
    token_s=6.95e-3,
    pass_rank_s=0.67e-3,
    step_rank_s=0.24e-3,
)

# One H200 SXM: 4.8 TB/s, 141 GB, PCIe 5 at 64 GB/s each way, and the H100's arithmetic units.
_HBM_BYTES_S = 4.8e12
_PCIE_BYTES_S = 64e9
# NVIDIA NeMo AutoModel, performance summary of 2 October 2025, "Finetuning (LoRA)": Llama 3 8B on
# one GPU, sequences of 4,096, two in a microbatch: 12,472.87 tokens/s, 402 TFLOP/s. That is 41 % of
# the 989 TFLOP/s of the H100 in bfloat16 that it reckons with.
_TOKENS_S = 12_473
_MICROBATCH_TOKENS = 2 * 4_096
_WEIGHTS_BYTES = 2 * 8.03e9
# Llama 3 8B: 32 layers; q, k, v, o, gate, up and down take 81,920 parameters for each rank, the
# head 4,096 + 128,256. Float32: weight, gradient and two moments.
_RANK_PARAMETERS = 32 * 81_920 + 132_352
_FLOAT = 4

H200 = Machine(
    description="one H200, Llama 3 8B in bfloat16, adapters on every layer",
    token_budget=_MICROBATCH_TOKENS,
    sequence_tokens=512,
    # The weights are read forwards and backwards. Starting kernels is not counted, so that what
    # sharing a pass gains is rather more than this says.
    pass_s=2 * _WEIGHTS_BYTES / _HBM_BYTES_S,
    token_s=1 / _TOKENS_S,
    # An adapter is read twice, its gradient read and written.
    pass_rank_s=4 * _FLOAT * _RANK_PARAMETERS / _HBM_BYTES_S,
    # Fused for all adapters: four arrays are read, three written, the gradient is cleared.
    step_rank_s=8 * _FLOAT * _RANK_PARAMETERS / _HBM_BYTES_S,
    rank_bytes=4 * _FLOAT * _RANK_PARAMETERS,
    # Beside 16 GB of weights, and 45 GB for the activations of a microbatch: an assumption.
    adapter_bytes=80e9,
    transfer_bytes_s=_PCIE_BYTES_S,
)

MACHINES: Mapping[str, Machine] = {
    "laptop": LAPTOP,
    "h200": H200,
    "h200-node": replace(
        H200.times(8), description="eight H200, Llama 3 8B in bfloat16 on each, tokens shared out"
    ),
}
