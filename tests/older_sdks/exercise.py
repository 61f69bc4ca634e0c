"""The core of the Tinker API as any SDK from 0.16 on speaks it, checked by arithmetic.

Run by the Python of another venv, which has that SDK and numpy and nothing of Hearth:

    exercise.py BASE_URL BASE_MODEL API_KEY

Prints one line a promise kept; the first that is not ends it with an AssertionError.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

URL, MODEL, KEY = sys.argv[1:4]
TOKENS = list(range(40, 60))
VERSION = tuple(int(part) for part in tinker.__version__.split(".")[:2])


def main() -> None:
    service = tinker.ServiceClient(base_url=URL, api_key=KEY)
    client = settle(service.create_lora_training_client(MODEL, rank=8, seed=3))
    for promise in (trains, computes_losses, samples, saves_and_resumes, downloads, refuses):
        promise(service, client)
        print(f"{tinker.__version__}: {promise.__name__.replace('_', ' ')}", flush=True)


def settle(value: Any) -> Any:
    """The result, whether this SDK gives a future or the thing itself."""
    return value.result() if hasattr(value, "result") else value


def datum(**inputs: Any) -> types.Datum:
    given = inputs or {"weights": [1.0] * (len(TOKENS) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], **given},
    )


def logprobs(output: Any) -> np.ndarray:
    return np.array(output.loss_fn_outputs[0]["logprobs"].data, dtype=np.float64)


def current(client: Any) -> np.ndarray:
    return logprobs(settle(client.forward([datum()], "cross_entropy")))


def step(client: Any) -> float:
    """One SFT step; the loss before it."""
    backward = client.forward_backward([datum()], "cross_entropy")
    optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
    settle(optim)
    return float(settle(backward).metrics["loss:sum"])


def trains(service: Any, client: Any) -> None:
    losses = [step(client) for _ in range(4)]
    assert losses == sorted(losses, reverse=True), losses
    output = settle(client.forward([datum()], "cross_entropy"))
    assert np.isclose(output.metrics["loss:sum"], -logprobs(output).sum(), rtol=1e-5)


def computes_losses(service: Any, client: Any) -> None:
    now = current(client)
    old = now - 0.1
    inputs = {"logprobs": old.tolist(), "advantages": [0.5] * len(old)}
    ratio = np.exp(0.1)
    for loss, wanted in (
        ("importance_sampling", -ratio * 0.5 * len(old)),
        ("ppo", -min(ratio, 1.2) * 0.5 * len(old)),
    ):
        got = settle(client.forward([datum(**inputs)], loss)).metrics["loss:sum"]
        assert np.isclose(got, wanted, rtol=1e-4), (loss, got, wanted)


def samples(service: Any, client: Any) -> None:
    sampler = settle(client.save_weights_and_get_sampling_client(name="older"))
    prompt = types.ModelInput.from_ints(TOKENS)
    scored = settle(sampler.compute_logprobs(prompt))
    assert scored[0] is None
    assert np.allclose(scored[1:], current(client), atol=1e-3)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop=[])
    first, again = (settle(sampler.sample(prompt, 2, params)) for _ in range(2))
    tokens = [sequence.tokens for sequence in first.sequences]
    assert tokens == [sequence.tokens for sequence in again.sequences]
    assert tokens[0] != tokens[1]
    assert [len(sequence) for sequence in tokens] == [6, 6]


def saves_and_resumes(service: Any, client: Any) -> None:
    path = settle(client.save_state("older")).path
    resumed = settle(service.create_training_client_from_state_with_optimizer(path))
    weights_only = settle(service.create_training_client_from_state(path))
    assert np.array_equal(current(weights_only), current(client))
    for each in (client, resumed, weights_only):
        step(each)
    assert np.allclose(current(resumed), current(client), atol=1e-6)
    assert not np.allclose(current(weights_only), current(client), atol=1e-6)


def downloads(service: Any, client: Any) -> None:
    """As an archive up to 0.35."""
    rest = service.create_rest_client()
    if not hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        return
    path = settle(client.save_weights_for_sampler("archived")).path
    url = settle(rest.get_checkpoint_archive_url_from_tinker_path(path)).url
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "archive"
        urllib.request.urlretrieve(url, archive)
        with tarfile.open(archive) as files:
            names = files.getnames()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names), names


def refuses(service: Any, client: Any) -> None:
    """Bad input is an error at once, and the next request works."""
    too_short = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:3], "weights": [1.0, 1.0]},
    )
    assert fails(lambda: settle(client.forward_backward([too_short], "cross_entropy")))
    assert len(current(client)) == len(TOKENS) - 1


def fails(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (tinker.TinkerError, ValueError):
        return True
    return False


if __name__ == "__main__":
    main()
