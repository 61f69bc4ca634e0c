"""What crosses between the service and the arithmetic: plain values and two protocols.

Shapes: N positions of a datum (input position i predicts row i), K targets a position,
T tokens of a prompt, G generated tokens. Arrays are numpy, C-contiguous, and never shared:
whoever receives one owns it. Everything here can be sent over a pipe (`workers/wire.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Category = Literal["user", "server"]
"""Whose mistake a failure is, in the words of the SDK."""

Contents = Literal["adapter", "optimizer", "snapshot"]
"""What a saved folder is read or written for: the adapter alone (a PEFT folder); with the
optimizer's moments (a training checkpoint); or with the gradient that waits for a step too
(what a crash is recovered from). Each holds what those before it hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSignature:
    """What a loss reads, so that a request can be checked before it is accepted."""

    required: tuple[str, ...]
    """Names in `loss_inputs` that every datum must have."""
    optional: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    """Legal keys of `loss_config`; each takes a finite number."""
    many_targets: bool = False
    """Whether `target_tokens` (and what goes with it) may be [N, K]."""
    recorded: tuple[str, ...] = ()
    """Inputs that the service puts in from what was recorded at sampling: every datum must say
    which sampled sequences its tokens come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the service must know of a base model to check a request before it costs anything."""

    vocab_size: int
    max_context_length: int
    num_parameters: int
    dtype: str
    device: str
    trainable_groups: tuple[str, ...]
    """Which of `attn`, `mlp`, `unembed` this architecture can adapt."""
    eos_token_ids: tuple[int, ...]
    losses: dict[str, LossSignature]
    max_lora_rank: int | None = None
    """The largest rank that whatever samples can take, where it has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The shape and the start of one adapter: y = W x + alpha / rank * B (A x)."""

    rank: int
    alpha: float
    seed: int
    """Fixes the initial A exactly; B starts at zero."""
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence to train on."""

    tokens: np.ndarray
    """int64[N]"""
    loss_inputs: dict[str, np.ndarray]
    """By name, float32 or int64, [N] or [N, K]; sparse inputs arrive here dense. Those that only
    a custom loss reads may have any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossInput:
    name: str
    rank: int
    """0 a number, 1 [N], 2 [N, K]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossNode:
    """One node of a traced loss, as torch.fx records it and the SDK encodes it."""

    op: str
    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss of the client's own, as data: from a datum's logprobs to a scalar and metrics."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """`logprobs` first, with the rank of `target_tokens`."""
    nodes: tuple[CustomLossNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Add the gradient of the summed loss to the run's accumulator, or only compute the loss."""

    run: str
    data: tuple[Datum, ...]
    loss: str
    loss_config: dict[str, float | str] = field(default_factory=dict)
    backward: bool = True
    custom_loss: CustomLoss | None = None
    """What is computed instead of `loss`, which is "custom" then."""
    more: bool = False
    """Whether this is only the next part of a request: its other datums follow in the run's next
    call, and nothing else of the run comes between but a `save`, which leaves the parts out."""
    part_of: int | None = None
    """Of a part, the last one too: how many datums the whole request has. What its datums share
    must not depend on how it was cut."""

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def num_data(self) -> int:
        """Of the whole request."""
        return len(self.data) if self.part_of is None else self.part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """What one ForwardBackward gives back."""

    outputs: tuple[dict[str, np.ndarray], ...]
    """One a datum: `logprobs` float32 [N] or [N, K], `elementwise_loss` float32 likewise
    (a custom loss has none)."""
    metrics: dict[str, float]
    """Always `loss:sum`; every name has exactly one colon, before its reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One AdamW step on the gradient accumulated since the last one, which it clears."""

    run: str
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Global L2 norm the gradient is scaled down to; 0 turns it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One request failed and nothing else did: no weight, gradient or moment moved for it."""

    message: str
    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A part of a request went well: the result of the whole comes with its last part. A part
    that fails ends the request, and what is left of it must not be sent."""


PassOutcome = LossResult | Partial | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """What one run takes, in bytes."""

    weights: int
    moments: int
    """Of the optimizer; 0 before the first step."""
    gradient: int
    """What is accumulated for the next step; 0 when nothing is."""
    on_device: bool
    """Whether it lies in a device slot; else in host memory (the same place on a CPU)."""

    @property
    def total(self) -> int:
        return self.weights + self.moments + self.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Of all processes of a trainer together."""

    base_model: int
    """Bytes of the frozen weights."""
    runs: dict[str, RunMemory]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Generate `num_samples` continuations of one prompt, and score the prompt if asked."""

    request_id: str
    prompt: np.ndarray
    """int64[T], T >= 1"""
    num_samples: int
    max_tokens: int
    adapter: str | None = None
    """A folder in PEFT format that nobody changes any more, or None for the base model."""
    session: str = ""
    """Whose requests had better be served in one place: they share prompts, and an adapter."""
    cache_namespace: str = ""
    """Prefixes are shared only between requests of one adapter and one namespace."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    """The samples of one request differ from each other; the same seed repeats them all."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with, and includes, the first of these."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends with the token that completes one of these in the generated text."""
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: np.ndarray | None = None
    """int64[T-1, K]; cell [i, j] is scored at prompt position i + 1; -1 asks for nothing."""
    prompt_alt_tokens_k: int = 0
    """How many tokens to draw at every prompt position after the first, at `temperature`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkLogprobs:
    """Row i holds the k best tokens at a position, best first. Rows without a distribution
    (prompt position 0, positions before the last n) are token 0 with logprob -99999."""

    token_ids: np.ndarray
    """int32[length, k]"""
    logprobs: np.ndarray
    """float32[length, k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    tokens: np.ndarray
    """int32[G]"""
    logprobs: np.ndarray
    """float32[G], of the model itself: not tempered, not filtered by top-k or top-p."""
    stop_reason: Literal["stop", "length"]
    topk: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """float32[T]; NaN where there is none (position 0, and before the last n)."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: np.ndarray | None = None
    """float32[T-1, K]; 0 where -1 asked for nothing."""
    prompt_alt_tokens: np.ndarray | None = None
    """int64[T-1, k]"""
    prompt_alt_logprobs: np.ndarray | None = None
    """float32[T-1, k], of the model itself."""
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one sample of a streamed request has gained since the delta before: 1 token or more."""

    index: int
    """Which of the request's `num_samples`."""
    tokens: np.ndarray
    """int32[G]"""
    logprobs: np.ndarray
    """float32[G]"""
    topk: TopkLogprobs | None = None


class TrainingBackend(Protocol):
    """Many runs on one frozen base model. Every call may be repeated after a crash: the service
    restores a run from its last snapshot folder and plays the journal again.

    A call raises `BackendError` when it fails as a whole; what fails for one run alone comes
    back as that run's `Failure`.
    """

    async def describe(self) -> ModelInfo: ...

    async def check_loss(self, loss: CustomLoss) -> str | None:
        """Why the loss cannot be run, naming the node, or None."""
        ...

    async def create(self, run: str, spec: AdapterSpec) -> None:
        """Give the run a fresh adapter; an existing one is replaced."""
        ...

    async def forward_backward(self, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
        """One packed pass for requests, or parts of them, of any number of runs; one outcome
        each. Several whole requests of a run may come in one call, in their order."""
        ...

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepResult | Failure]:
        """Step several runs together, at most one step a run."""
        ...

    async def save(self, run: str, directory: str, contents: Contents) -> int:
        """Write a folder that appears whole or not at all. Returns its size in bytes."""
        ...

    async def load(self, run: str, directory: str, contents: Contents) -> AdapterSpec:
        """Replace the run's state by a saved one. The gradient that waited is dropped (but for
        `snapshot`, which brings its own); with `adapter` the moments start at zero."""
        ...

    async def unload(self, run: str) -> None:
        """Forget the run's tensors; unknown runs are forgotten already."""
        ...

    async def memory(self) -> MemoryReport: ...


class SamplingEngine(Protocol):
    """Generates from the base model and from any number of saved adapters at once."""

    async def sample(self, request: SampleRequest) -> SampleResult | Failure: ...

    def stream(
        self, request: SampleRequest
    ) -> AsyncGenerator[SampleDelta | SampleResult | Failure]:
        """The same, token by token: deltas, whose tokens together are those of the result, then
        the result or a Failure. It never waits for its reader: what is not read yet is joined
        to one delta a sample. A reader that leaves early cancels the request."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop generating for a request; its `sample` call returns a Failure soon after."""
        ...

    async def update(self, old: str, new: str) -> None:
        """What is being generated with the adapter in folder `old` goes on with that in `new`,
        over the keys and values that it has. Both must stay until that has ended. Raises
        BackendError where it could not be done: what runs there goes on as it was."""
        ...


PauseMode = Literal["wait", "keep", "abort"]
"""What becomes of what is being generated: finished first, frozen until `resume`, or ended."""

ReplicaState = Literal["starting", "ready", "paused", "draining", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One server of a sampling fleet, as its operators see it."""

    name: str
    url: str | None
    """None while there is no server."""
    state: ReplicaState
    load: int
    """Samples sent to it and not finished."""
    adapters: tuple[str, ...]
    """Folders that it holds."""
    generation: int
    """How often it has become ready: every start but the first is a restart."""
    requests: int
    """All that were sent to it."""
    lost_requests: int
    """Those that it took down with it."""
    version: str | None
    """Of the server's software."""


class SamplingFleet(SamplingEngine, Protocol):
    """An engine of several servers. Calls on one replica raise KeyError for a name that none has,
    and BackendError when it cannot do what is asked."""

    async def start(self) -> None:
        """Returns when every replica is ready. Raises BackendError when one cannot be had."""
        ...

    async def stop(self) -> None: ...

    def replicas(self) -> list[ReplicaStatus]: ...

    async def pause(self, replica: str, mode: PauseMode) -> None:
        """Send it nothing new. What is ended is asked again, elsewhere or after `resume`."""
        ...

    async def drain(self, replica: str) -> None:
        """Send it nothing new, have it finish what it has, and leave it idle until `resume`."""
        ...

    async def resume(self, replica: str) -> None: ...

    def held_up(self, request_id: str) -> str | None:
        """Why nothing can be generated for a request, be it here or yet to come."""
        ...

    def frozen_samples(self) -> int:
        """Those that are with replicas which have been told to generate nothing."""
        ...


class BackendError(Exception):
    """A backend broke as a whole: nothing is known about the calls in flight."""
