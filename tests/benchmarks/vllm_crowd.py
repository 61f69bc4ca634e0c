"""Many samples at once from one client through real vLLM replicas: none may fail. By itself,

    python -m tests.benchmarks.vllm_crowd [--samples 2000] [--replicas 2] [--adapters 6]

Half of the samples are of the base model, the others of so many adapters. Prints what it took, and
ends with 1 when a sample failed or came short.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import tinker
from tinker import types

from tests.benchmarks.machine import facts
from tests.benchmarks.scale import MODEL_NAME
from tests.benchmarks.served import client, processor_seconds_of, serving

PROMPT_TOKENS = 64
NEW_TOKENS = 16
WAIT_S = 3600.0


@dataclass
class Crowd:
    """Samples that are asked for together, and what became of them."""

    samplers: Sequence[tinker.SamplingClient]
    count: int
    latencies: list[float] = field(default_factory=list)
    """Seconds from the first submission on."""
    failures: list[str] = field(default_factory=list)

    def run(self) -> float:
        """Seconds until the last has come."""
        prompts = np.random.default_rng(0).integers(100, 1000, (self.count, PROMPT_TOKENS)).tolist()
        params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
        began = time.monotonic()
        futures = []
        for i, prompt in enumerate(prompts):
            sampler = self.samplers[i // 2 % (len(self.samplers) - 1) + 1 if i % 2 else 0]
            future = sampler.sample(types.ModelInput.from_ints(prompt), 1, params)
            future.future().add_done_callback(
                lambda _: self.latencies.append(time.monotonic() - began)
            )
            futures.append(future)
        for future in futures:
            self._check(future)
        return time.monotonic() - began

    def _check(self, future: tinker.APIFuture[types.SampleResponse]) -> None:
        try:
            (sequence,) = future.result(timeout=WAIT_S).sequences
        except tinker.TinkerError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        if not len(sequence.tokens) == len(sequence.logprobs or ()) == NEW_TOKENS:
            self.failures.append(f"{len(sequence.tokens)} tokens")


def main() -> None:
    options = _parse()
    warnings.simplefilter("ignore")
    print(facts()["machine"])
    replicas = ("--engine", "vllm", "--replicas", str(options.replicas))
    with (
        serving({MODEL_NAME: options.model}, threads=1, options=replicas) as server,
        client(server) as service,
    ):
        crowd = Crowd(_samplers(service, options.adapters), options.samples)
        before = processor_seconds_of([server.pid])
        seconds = crowd.run()
        own = processor_seconds_of([server.pid]) - before
        memory = psutil.Process(server.pid).memory_info().rss / 2**20
    _report(crowd, options.replicas, seconds, own, memory)
    sys.exit(1 if crowd.failures else 0)


def _samplers(service: tinker.ServiceClient, adapters: int) -> list[tinker.SamplingClient]:
    """Of the base model, then of each adapter."""
    made = [service.create_sampling_client(base_model=MODEL_NAME).result()]
    for seed in range(adapters):
        run = service.create_lora_training_client(MODEL_NAME, rank=8, seed=seed).result()
        made.append(run.save_weights_and_get_sampling_client().result())
    return made


def _report(crowd: Crowd, replicas: int, seconds: float, own: float, memory: float) -> None:
    waited = np.percentile(crowd.latencies, [50, 95, 100])
    print(
        f"{crowd.count} samples at once of {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {replicas} "
        f"replicas, {len(crowd.samplers) - 1} adapters: {len(crowd.failures)} failed"
    )
    print(
        f"{seconds:.1f} s, {crowd.count * NEW_TOKENS / seconds:.0f} tokens/s; a sample came after "
        f"{waited[0]:.1f} s (median), {waited[1]:.1f} (95th percentile), {waited[2]:.1f} (last)"
    )
    print(f"the service: {1000 * own / crowd.count:.1f} ms of processor a sample, {memory:.0f} MiB")
    for failure in sorted(set(crowd.failures))[:5]:
        print(f"  {failure}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=6)
    parser.add_argument("--model", type=Path, default=Path("models") / MODEL_NAME)
    return parser.parse_args()


if __name__ == "__main__":
    main()
