"""Short ways to say what an e2e test does, with the SDK and without it."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

MODEL = "tiny/llama"
UNTIED = "tiny/qwen3"
VOCAB_SIZE = 256
MAX_CONTEXT_LENGTH = 512
WAIT_S = 60.0
PROTOBUF = {"content-type": "application/x-protobuf"}
_names = itertools.count()


def wait(future: Any) -> Any:
    """The result of an SDK future; nothing here may take long."""
    return future.result(timeout=WAIT_S)


def fresh(prefix: str = "name") -> str:
    """A checkpoint name that no other test uses."""
    return f"{prefix}-{next(_names)}"


# ---------------------------------------------------------------- data


def sft(tokens: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    """Predict each token from those before it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            "weights": list(weights) if weights is not None else [1.0] * (len(tokens) - 1),
        },
    )


def rl(
    tokens: Sequence[int], old: Sequence[float], advantages: Sequence[float], **more: Any
) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            "logprobs": list(old),
            "advantages": list(advantages),
            **more,
        },
    )


def text(seed: int, length: int = 17) -> list[int]:
    """Random tokens without the end of sequence."""
    return np.random.default_rng(seed).integers(32, 127, length).tolist()


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


DATA = [sft(list(range(40, 57)))]
PROBE = text(99, 24)


# ---------------------------------------------------------------- training


def new_run(
    service: tinker.ServiceClient, seed: int | None = 1, rank: int = 8, **options: Any
) -> tinker.TrainingClient:
    model = options.pop("base_model", MODEL)
    return wait(service.create_lora_training_client(model, rank=rank, seed=seed, **options))


def adam(learning_rate: float = 1e-2, **more: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=learning_rate, **more)


def step(
    run: tinker.TrainingClient,
    data: Sequence[types.Datum] = DATA,
    learning_rate: float = 1e-2,
    loss: Any = "cross_entropy",
    config: dict[str, float | str] | None = None,
) -> types.ForwardBackwardOutput:
    passed = run.forward_backward(list(data), loss, config)
    stepped = run.optim_step(adam(learning_rate))
    output = wait(passed)
    wait(stepped)
    return output


def train(run: tinker.TrainingClient, steps: int, data: Sequence[types.Datum] = DATA) -> None:
    """So many steps, sent at once."""
    futures = [
        future
        for _ in range(steps)
        for future in (
            run.forward_backward(list(data), "cross_entropy"),
            run.optim_step(adam()),
        )
    ]
    for future in futures:
        wait(future)


def output_logprobs(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray:
    return np.array(output.loss_fn_outputs[index]["logprobs"].data, dtype=np.float64)


def fingerprint(run: tinker.TrainingClient, tokens: Sequence[int] = PROBE) -> np.ndarray:
    """What the run's weights make of a text: equal for equal weights."""
    return output_logprobs(wait(run.forward([sft(tokens)], "cross_entropy")))


def sampler_fingerprint(
    sampler: tinker.SamplingClient, tokens: Sequence[int] = PROBE
) -> np.ndarray:
    return np.array(wait(sampler.compute_logprobs(prompt(tokens)))[1:], dtype=np.float64)


def sampler_of(run: tinker.TrainingClient, **options: Any) -> tinker.SamplingClient:
    return wait(run.save_weights_and_get_sampling_client(**options))


def generate(
    sampler: tinker.SamplingClient, tokens: Sequence[int], max_tokens: int, **params: Any
) -> types.SampledSequence:
    sampled = sampler.sample(
        prompt(tokens), 1, types.SamplingParams(max_tokens=max_tokens, **params)
    )
    return wait(sampled).sequences[0]


def same(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and float(np.abs(a - b).max()) <= tolerance


def assert_same(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


# ---------------------------------------------------------------- refusals


@contextmanager
def refused(*words: str, category: str = "user") -> Iterator[None]:
    """The block fails as a mistake of the caller, and the message has all the words."""
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as caught:
        yield
    error = caught.value
    if isinstance(error, tinker.RequestFailedError):
        assert error.category == category, error
    else:
        assert 400 <= error.status_code < 500, error
        assert error.status_code not in (408, 409, 429), error
    for word in words:
        assert word in str(error), error


@contextmanager
def leaves_untouched(run: tinker.TrainingClient) -> Iterator[None]:
    """A gradient waits while the block runs. It is still there afterwards, and nothing else:
    the next step moves the weights as far as it does for a run that never saw the block."""
    other = wait(run.save_state(fresh("before")))
    passed = run.forward_backward(DATA, "cross_entropy")
    wait(passed)
    yield
    result = wait(run.optim_step(adam()))
    twin = wait(_holder(run).create_training_client_from_state_with_optimizer(other.path))
    wait(twin.forward_backward(DATA, "cross_entropy"))
    expected = wait(twin.optim_step(adam()))
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert_same(fingerprint(run), fingerprint(twin), 1e-5)


def _holder(run: tinker.TrainingClient) -> tinker.ServiceClient:
    holder = run.holder
    return tinker.ServiceClient(base_url=str(holder._constructor_kwargs["base_url"]))


# ---------------------------------------------------------------- files


def download(rest: tinker.RestClient, path: str, folder: Path) -> Path:
    """Fetch a checkpoint's files by their signed URLs, as anyone who has those can."""
    urls = wait(rest.get_external_weights_urls(path)).urls
    folder.mkdir(parents=True)
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            (folder / name).write_bytes(answer.read())
    return folder


def adapter_of(
    run: tinker.TrainingClient, rest: tinker.RestClient, folder: Path
) -> dict[str, torch.Tensor]:
    """The run's weights now, by their names on disk."""
    saved = wait(run.save_weights_external(fresh("export")))
    return load_file(download(rest, saved.path, folder) / "adapter_model.safetensors")


# ---------------------------------------------------------------- without the SDK


class Raw:
    """Plain HTTP: what another client, or an attacker, could send."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        headers = {"X-API-Key": key} if key else {}
        self.http = httpx2.Client(
            base_url=f"{url}/api/v1", headers=headers, timeout=WAIT_S, trust_env=False
        )

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """`body`: bytes are sent as they are, anything else as JSON."""
        if isinstance(body, bytes):
            return self.http.post(path, content=body, **options)
        return self.http.post(path, json=body if body is not None else {}, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.http.get(path, **options)

    def promise(self, path: str, body: Any, **options: Any) -> str:
        """Submit; the request's id."""
        answer = self.post(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def outcome(self, request: str) -> httpx2.Response:
        """What retrieve_future says once it does not say "try again"."""
        while (
            answer := self.post(
                "retrieve_future",
                {"request_id": request},
                headers={"Accept": "application/x-protobuf"},
            )
        ).status_code == 408:
            pass
        return answer

    def session(self) -> str:
        answer = self.post("create_session", {"tags": [], "sdk_version": "raw"})
        return answer.json()["session_id"]

    def run(self, seed: int = 1, rank: int = 8) -> str:
        """A new run's id."""
        body = {
            "session_id": self.session(),
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": rank, "seed": seed},
        }
        answer = self.outcome(self.promise("create_model", body)).json()
        return answer["model_id"]

    def logprobs(self, run: str, seq: int, tokens: Sequence[int] = PROBE) -> np.ndarray:
        """What `fingerprint` is with the SDK."""
        answer = self.outcome(self.forward_backward(run, seq, [sft(tokens)], forward_only=True))
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(answer.content)
        fields = output.loss_fn_outputs[0].fields
        return np.frombuffer(fields["logprobs"].data, "<f4").astype(np.float64)

    def forward_backward(
        self, run: str, seq: int, data: Sequence[types.Datum] = DATA, **fields: Any
    ) -> str:
        body = pass_body(run, seq, data, **fields)
        return self.promise("forward_backward", body, headers=PROTOBUF)

    def optim_step(self, run: str, seq: int, learning_rate: float = 1e-2) -> str:
        body = {
            "model_id": run,
            "seq_id": seq,
            "adam_params": {"learning_rate": learning_rate},
        }
        return self.promise("optim_step", body)


def pass_body(
    run: str,
    seq: int,
    data: Sequence[types.Datum] = DATA,
    loss: str = "cross_entropy",
    forward_only: bool = False,
) -> bytes:
    """A forward_backward body, built field by field from the documented schema."""
    message = pb.ForwardBackwardRequest(
        model_id=run, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    for datum in data:
        one = message.data.add()
        tokens = np.array(datum.model_input.to_ints(), dtype="<i4")
        one.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, tensor in datum.loss_fn_inputs.items():
            array = np.array(tensor.data, dtype="<i8" if tensor.dtype == "int64" else "<f4")
            one.loss_fn_inputs[name].dense = array.tobytes()
            one.loss_fn_inputs[name].dtype = pb.DTYPE_INT64 if tensor.dtype == "int64" else 1
            one.loss_fn_inputs[name].shape.append(len(array))
    return message.SerializeToString()
