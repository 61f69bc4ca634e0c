"""What we encode, read by the SDK."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.proto.response_conv import deserialize_forward_backward_output

from backends.contract import LossResult
from server.wire.json_results import loss_json
from server.wire.loss_results import encode_loss_result


@st.composite
def results(draw: st.DrawFn) -> LossResult:
    """Datums of one set of names, each with its own length and its own K or none."""
    names = draw(st.lists(st.sampled_from(["logprobs", "elementwise_loss", "ids"]), unique=True))
    shape = st.tuples(st.integers(0, 4)) | st.tuples(st.integers(0, 4), st.integers(1, 3))
    outputs = []
    for _ in range(draw(st.integers(0, 6))):
        size = draw(shape)
        outputs.append(
            {
                name: draw(hnp.arrays(np.int64 if name == "ids" else np.float32, size))
                for name in names
            }
        )
    metrics = draw(st.dictionaries(st.sampled_from(["loss:sum", "a:mean"]), st.floats()))
    return LossResult(outputs=tuple(outputs), metrics=metrics)


@given(results())
def test_the_sdk_reads_what_was_computed(result: LossResult) -> None:
    read = deserialize_forward_backward_output(encode_loss_result(result))

    assert len(read.loss_fn_outputs) == len(result.outputs)
    for theirs, ours in zip(read.loss_fn_outputs, result.outputs, strict=True):
        assert set(theirs) == set(ours)
        for name, array in ours.items():
            np.testing.assert_array_equal(theirs[name].to_numpy(), array)
            assert theirs[name].shape == list(array.shape)
            assert theirs[name].dtype == str(array.dtype)
    np.testing.assert_equal(read.metrics, result.metrics)


def test_datums_of_alternating_width_keep_their_order() -> None:
    widths = [1, 2, 2, 1]
    outputs = tuple(
        {"logprobs": np.full((3, k), i, dtype=np.float32)} for i, k in enumerate(widths)
    )
    read = deserialize_forward_backward_output(
        encode_loss_result(LossResult(outputs=outputs, metrics={}))
    )

    shapes = [output["logprobs"].shape for output in read.loss_fn_outputs]
    assert shapes == [[3, k] for k in widths]
    assert [output["logprobs"].data[0] for output in read.loss_fn_outputs] == [0, 1, 2, 3]


def test_the_output_type_is_the_one_the_sdk_documents() -> None:
    result = LossResult(outputs=({"logprobs": np.zeros(1, np.float32)},), metrics={})

    assert deserialize_forward_backward_output(encode_loss_result(result)).loss_fn_output_type == (
        "TorchLossReturn"
    )


def test_wider_dtypes_travel_as_the_two_the_client_knows() -> None:
    output = {"logprobs": np.array([0.5]), "ids": np.array([7], dtype=np.int32)}
    read = deserialize_forward_backward_output(
        encode_loss_result(LossResult(outputs=(output,), metrics={}))
    ).loss_fn_outputs[0]

    assert (read["logprobs"].dtype, read["logprobs"].data) == ("float32", [0.5])
    assert (read["ids"].dtype, read["ids"].data) == ("int64", [7])


def test_datums_with_different_outputs_are_our_own_mistake() -> None:
    one = {"logprobs": np.zeros(1, np.float32)}

    with pytest.raises(AssertionError):
        encode_loss_result(LossResult(outputs=(one, {}), metrics={}))


def test_old_sdks_get_flat_data_with_its_shape() -> None:
    logprobs = np.array([[-1.5, -2], [-3, -4]], dtype=np.float32)
    result = LossResult(outputs=({"logprobs": logprobs},), metrics={"loss:sum": 3.0})
    answer = loss_json(encode_loss_result(result))

    assert orjson.loads(orjson.dumps(answer)) == {
        "loss_fn_output_type": "TorchLossReturn",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.5, -2, -3, -4], "dtype": "float32", "shape": [2, 2]}}
        ],
        "metrics": {"loss:sum": 3.0},
    }
