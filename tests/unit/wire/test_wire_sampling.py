"""Bodies made by the SDK's own model of the request, and bodies that it would never make."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker._compat import model_dump
from tinker.types._pydantic_types.tensor_data import TensorData
from tinker.types.sample_request import SampleRequest as SdkRequest

from backends.contract import ModelInfo, SampleRequest
from server.core.errors import BadInput, ServiceError
from server.wire.sampling import decode_sample, target_layout, to_sample_request


def sdk_body(*, unset: bool = False, params: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """As 0.38 sends it, or with `unset` left out as 0.16 does."""
    request = SdkRequest(
        prompt=tinker.ModelInput.from_ints([5, 6, 7, 8]),
        sampling_params=tinker.SamplingParams(**(params or {})),
        sampling_session_id="session:sample:0",
        seq_id=10**18,
        **fields,
    )
    dumped = model_dump(request, exclude_unset=unset, exclude_none=not unset, mode="json")
    return orjson.dumps(dumped)


def asked(body: bytes, info: ModelInfo) -> SampleRequest:
    return to_sample_request(
        decode_sample(body),
        request_id="r",
        adapter="/a",
        session="s",
        cache_namespace="n",
        info=info,
    )


def raw(**fields: Any) -> bytes:
    return orjson.dumps({"prompt": {"chunks": [{"tokens": [5]}]}, **fields})


@pytest.mark.parametrize("unset", [False, True])
def test_a_request_of_defaults_asks_for_one_sample_to_the_end(info: ModelInfo, unset: bool) -> None:
    request = asked(sdk_body(unset=unset), info)

    assert request.prompt.dtype == np.int64
    assert request.prompt.tolist() == [5, 6, 7, 8]
    assert (request.request_id, request.adapter) == ("r", "/a")
    assert (request.session, request.cache_namespace) == ("s", "n")
    assert (request.temperature, request.top_k, request.top_p) == (1.0, -1, 1.0)
    assert request.seed is None
    assert request.num_samples == 1
    assert not request.prompt_logprobs
    assert request.prompt_logprobs_last_n is None
    assert request.target_prompt_tokens is None
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs) == (0, 0)
    assert request.prompt_alt_tokens_k == 0


@pytest.mark.parametrize("unset", [False, True])
def test_every_field_that_is_set_arrives(info: ModelInfo, unset: bool) -> None:
    body = sdk_body(
        unset=unset,
        params={"max_tokens": 3, "seed": 4, "temperature": 0.5, "top_k": 6, "top_p": 0.75},
        num_samples=7,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=8,
        topk_sample_logprobs=9,
        prompt_alt_tokens_k=10,
        record_stability_info=True,
    )
    request = asked(body, info)

    assert (request.max_tokens, request.seed, request.temperature) == (3, 4, 0.5)
    assert (request.top_k, request.top_p, request.num_samples) == (6, 0.75, 7)
    assert (request.prompt_logprobs, request.prompt_logprobs_last_n) == (True, 2)
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs) == (8, 9)
    assert request.prompt_alt_tokens_k == 10


def test_the_ids_of_the_request_are_read() -> None:
    body = decode_sample(sdk_body())

    assert (body.sampling_session_id, body.seq_id) == ("session:sample:0", 10**18)


def test_fields_of_a_newer_sdk_are_ignored(info: ModelInfo) -> None:
    assert asked(raw(invented=1, sampling_params={"invented": 2}), info).num_samples == 1


@pytest.mark.parametrize(
    ("stop", "ids", "strings"),
    [
        (None, (2, 3), ()),
        ([], (), ()),
        ("END", (), ("END",)),
        (["a", "b"], (), ("a", "b")),
        ([9, 8], (9, 8), ()),
    ],
)
def test_only_no_stop_at_all_means_the_models_own_end(
    info: ModelInfo, stop: Any, ids: tuple[int, ...], strings: tuple[str, ...]
) -> None:
    request = asked(sdk_body(params={"stop": stop}), info)

    assert request.stop_token_ids == ids
    assert request.stop_strings == strings


@pytest.mark.parametrize("stop", [[1, "a"], 5, {"a": 1}, [True], [1.5], [[1]]])
def test_a_stop_of_another_kind_is_refused(info: ModelInfo, stop: Any) -> None:
    with pytest.raises(BadInput, match="stop: must be a string, a list of strings"):
        asked(raw(sampling_params={"stop": stop}), info)


@given(st.integers(-(10**40), 10**40))
def test_any_seed_is_folded_to_63_bits_the_same_way_every_time(seed: int) -> None:
    info = ModelInfo(
        vocab_size=9,
        max_context_length=9,
        num_parameters=1,
        dtype="float32",
        device="cpu",
        trainable_groups=(),
        eos_token_ids=(),
        losses={},
    )
    body = b'{"prompt": {"chunks": []}, "sampling_params": {"seed": %d}}' % seed
    folded = asked(body, info).seed

    assert folded is not None
    assert 0 <= folded < 2**63
    assert (folded - seed) % 2**63 == 0


@pytest.mark.parametrize(("wanted", "given_"), [(None, 12), (12, 12), (13, 12), (10**30, 12)])
def test_a_sample_ends_with_the_context(info: ModelInfo, wanted: int | None, given_: int) -> None:
    body = b'{"prompt": {"chunks": [{"tokens": [1, 1, 1, 1]}]}, "sampling_params": {%s}}' % (
        b"" if wanted is None else b'"max_tokens": %d' % wanted
    )

    assert asked(body, info).max_tokens == given_


def test_dense_targets_arrive_as_they_were_sent(info: ModelInfo) -> None:
    targets = np.array([[1, -1], [2, 3], [-1, -1]])
    body = sdk_body(target_prompt_logprobs=TensorData.from_numpy(targets))
    arrived = asked(body, info).target_prompt_tokens

    assert arrived is not None
    assert arrived.dtype == np.int64
    np.testing.assert_array_equal(arrived, targets)
    assert target_layout(decode_sample(body)) is None


def test_cells_that_sparse_targets_do_not_list_ask_for_nothing(info: ModelInfo) -> None:
    targets = torch.full((3, 8), -1)
    targets[0, 2], targets[2, 0], targets[2, 7] = 4, 0, 6
    sent = TensorData.from_torch_sparse(targets, pad_value=-1)
    assert sent.sparse_crow_indices is not None
    body = sdk_body(target_prompt_logprobs=sent)

    np.testing.assert_array_equal(asked(body, info).target_prompt_tokens, targets.numpy())
    layout = target_layout(decode_sample(body))
    assert layout is not None
    assert layout.shape == (3, 8)
    assert layout.crow.tolist() == sent.sparse_crow_indices
    assert layout.col.tolist() == sent.sparse_col_indices


REFUSED = {
    "no prompt": (b"{}", "prompt: is missing"),
    "an image": (
        raw(prompt={"chunks": [{"tokens": [1]}, {"type": "image", "data": "", "format": "png"}]}),
        r"prompt.chunks\[1\]: is of type 'image'",
    ),
    "audio": (raw(prompt={"chunks": [{"type": "dmel", "dmel": ""}]}), r"chunks\[0\].*'dmel'"),
    "text for a number": (raw(num_samples="3"), "num_samples: .*got '3'"),
    "a boolean for a number": (raw(topk_prompt_logprobs=True), "topk_prompt_logprobs"),
    "a fraction for an integer": (raw(sampling_params={"max_tokens": 1.5}), "max_tokens"),
    "a negative seq_id": (raw(seq_id=-1), "seq_id: .*got -1"),
    "targets of floats": (
        raw(target_prompt_logprobs={"data": [1.0], "dtype": "float32"}),
        "target_prompt_logprobs: dtype is float32; token ids are int64",
    ),
    "targets of another shape": (
        raw(target_prompt_logprobs={"data": [1], "dtype": "int64", "shape": [2, 2]}),
        r"target_prompt_logprobs: shape \[2, 2\] holds 4 values, 1",
    ),
    "sparse targets of giant shape": (
        raw(
            target_prompt_logprobs={
                "data": [],
                "dtype": "int64",
                "shape": [2**62, 2],
                "sparse_crow_indices": [0],
                "sparse_col_indices": [],
            }
        ),
        "crow_indices has 1 entries",
    ),
    "no JSON": (b"{", "not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_body_that_cannot_be_read_is_refused_by_its_field(info: ModelInfo, case: str) -> None:
    body, finding = REFUSED[case]
    with pytest.raises(BadInput, match=finding):
        asked(body, info)


@given(st.binary(max_size=50))
def test_no_bytes_break_the_reader(body: bytes) -> None:
    with pytest.raises(ServiceError):
        decode_sample(body)
