"""Bodies made by the SDK itself, and bodies that no SDK would make."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from server.core.errors import BadInput, ServiceError
from server.wire import schema
from server.wire.tensors import (
    MAX_DENSE_CELLS,
    MAX_TARGETS,
    CellBudget,
    FlatTensor,
    to_dense,
)
from server.wire.training import (
    MAX_DATUMS,
    MAX_INPUTS,
    PROTOBUF_CONTENT_TYPE,
    ContentRefused,
    Envelope,
    TrainingSubmission,
    decode_training,
)


def sdk_message(*data: tinker.Datum, config: dict[str, float | str] | None = None) -> Any:
    return forward_backward_request_to_proto(
        ForwardBackwardRequest(
            forward_backward_input=ForwardBackwardInput(
                data=list(data), loss_fn="cross_entropy", loss_fn_config=config
            ),
            model_id="run",
            seq_id=7,
        )
    )


def decode_proto(message: Any) -> TrainingSubmission:
    return decode_training(message.SerializeToString(), PROTOBUF_CONTENT_TYPE)


def refusal_of(body: bytes, content_type: str) -> ServiceError | None:
    """Whatever else is raised fails the test."""
    try:
        decode_training(body, content_type)
    except ServiceError as error:
        return error
    return None


def sdk_datum(tokens: int = 3, **inputs: Any) -> tinker.Datum:
    """Any: the SDK turns lists, arrays and torch tensors into its TensorData itself."""
    return tinker.Datum(model_input=text([1] * tokens), loss_fn_inputs=inputs)


def text(*chunks: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=part) for part in chunks])


def one_input(values: Any) -> np.ndarray:
    """What arrives when the SDK sends a datum with the values as its weights."""
    message = sdk_message(sdk_datum(weights=values))
    return decode_proto(message).request.data[0].loss_inputs["weights"]


arrays = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.int64]),
    shape=hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6),
)


def test_the_envelope_and_the_loss_arrive() -> None:
    submission = decode_proto(sdk_message(tinker.Datum(model_input=text([5, 6]))))

    assert (submission.model_id, submission.seq_id) == ("run", 7)
    assert submission.request.run == "run"
    assert submission.request.loss == "cross_entropy"
    assert submission.request.backward


def test_forward_only_computes_no_gradient() -> None:
    message = sdk_message()
    message.forward_only = True

    assert not decode_proto(message).request.backward


def test_text_chunks_become_one_sequence() -> None:
    datum = tinker.Datum(model_input=text([1, 2], [], [2**31 - 1]))
    tokens = decode_proto(sdk_message(datum)).request.data[0].tokens

    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 2, 2**31 - 1]


def test_an_input_without_chunks_is_an_empty_sequence() -> None:
    datum = tinker.Datum(model_input=tinker.ModelInput.empty())

    assert decode_proto(sdk_message(datum)).request.data[0].tokens.shape == (0,)


@given(arrays)
def test_an_array_arrives_as_it_was_sent(array: np.ndarray) -> None:
    arrived = one_input(array)

    np.testing.assert_array_equal(arrived, array)
    assert arrived.dtype == array.dtype
    assert arrived.flags.writeable


@given(
    hnp.arrays(
        np.int64,
        st.tuples(st.integers(1, 6), st.integers(1, 12)),
        elements=st.sampled_from([0, 0, 0, 0, 1, -5, 2**40]),
    )
)
def test_a_tensor_the_sdk_sends_sparse_arrives_dense(array: np.ndarray) -> None:
    np.testing.assert_array_equal(one_input(torch.from_numpy(array)), array)


def test_the_sdk_does_send_sparse_tensors() -> None:
    array = torch.zeros(4, 32)
    array[2, 5] = 1.5
    message = sdk_message(sdk_datum(4, weights=array))

    assert message.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    arrived = decode_proto(message).request.data[0].loss_inputs["weights"]
    np.testing.assert_array_equal(arrived, array.numpy())


def test_a_scalar_arrives_as_one_element() -> None:
    assert one_input(np.array(2.5, dtype=np.float32)).tolist() == [2.5]


def test_narrow_dtypes_are_widened() -> None:
    message = sdk_message(tinker.Datum(model_input=text([1, 2])))
    half, short = (message.data[0].loss_fn_inputs[name] for name in ("half", "short"))
    halves = torch.tensor([1.5, -0.25], dtype=torch.bfloat16)
    half.dense, half.dtype = halves.view(torch.int16).numpy().tobytes(), schema.DTYPE_BFLOAT16
    short.dense, short.dtype = np.array([3, -4], dtype="<i4").tobytes(), schema.DTYPE_INT32

    inputs = decode_proto(message).request.data[0].loss_inputs

    assert (inputs["half"].dtype, inputs["half"].tolist()) == (np.float32, [1.5, -0.25])
    assert (inputs["short"].dtype, inputs["short"].tolist()) == (np.int64, [3, -4])


def test_the_newer_config_is_preferred_since_only_it_has_text() -> None:
    message = sdk_message(config={"beta": 0.5, "loss_id": "abc"})

    assert decode_proto(message).request.loss_config == {"beta": 0.5, "loss_id": "abc"}


def test_the_older_config_is_read_when_it_is_the_only_one() -> None:
    message = sdk_message(config={"beta": 0.5})
    message.ClearField("loss_fn_config_v2")

    assert decode_proto(message).request.loss_config == {"beta": 0.5}


def tensor(**fields: Any) -> Any:
    return schema.Tensor(**{"dtype": schema.DTYPE_FLOAT32, **fields})


def sparse(
    shape: tuple[int, ...], crow: list[int], col: list[int], values: list[float] | None = None
) -> Any:
    message = tensor(shape=shape)
    sent = [1.0] * len(col) if values is None else values
    message.sparse_csr.values = np.array(sent, dtype="<f4").tobytes()
    message.sparse_csr.crow_indices = np.array(crow, dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.array(col, dtype="<i8").tobytes()
    return message


def with_input(message: Any) -> bytes:
    """A body whose second datum has this tensor as its weights."""
    body = schema.ForwardBackwardRequest(model_id="run", seq_id=7, loss_fn="cross_entropy")
    body.data.add()
    body.data.add().loss_fn_inputs["weights"].CopyFrom(message)
    return body.SerializeToString()


FOUR = bytes(16)
MALFORMED = {
    "bytes that are no whole number of items": (tensor(dense=bytes(10)), "10 bytes.*multiple of 4"),
    "a shape of another size": (tensor(dense=FOUR, shape=[2, 3]), r"\[2, 3\] holds 6 values, 4"),
    "a shape with an astronomic product": (tensor(dense=FOUR, shape=[2**62, 1000]), "holds"),
    "more columns than the limit": (tensor(dense=FOUR, shape=[0, 2**62]), "limit is 1024"),
    "a negative size": (tensor(dense=FOUR, shape=[-2, -2]), r"\[-2, -2\] has a negative size"),
    "three dimensions": (tensor(dense=FOUR, shape=[2, 2, 1]), "3 dimensions; the limit is 2"),
    "many dimensions": (tensor(dense=FOUR, shape=[1] * 9999), "9999 dimensions"),
    "no dtype": (tensor(dense=FOUR, dtype=0), "dtype is 0"),
    "an unknown dtype": (tensor(dense=FOUR, dtype=9), "dtype is 9"),
    "no values": (tensor(), "neither dense nor sparse"),
    "sparse without shape": (sparse((), [0, 1], [0]), "0 dimensions; it needs 2"),
    "sparse in one dimension": (sparse((1,), [0, 1], [0]), "1 dimensions; it needs 2"),
    "sparse with a negative size": (sparse((-1, 4), [0], []), "negative size"),
    "sparse with too many rows": (sparse((2**60, 4), [0, 1], [0]), "crow_indices has 2 entries"),
    "sparse with too many columns": (sparse((1, 2**60), [0, 1], [0]), "limit is 1024"),
    "sparse without row pointers": (sparse((0, 4), [], []), "crow_indices has 0 entries"),
    "a negative row pointer": (sparse((2, 4), [0, -1, 1], [0]), "must rise from 0 to 1"),
    "a row pointer past the values": (sparse((2, 4), [0, 9, 1], [0]), "must rise from 0 to 1"),
    "row pointers whose difference wraps": (
        sparse((2, 4), [0, 2**63 - 1, -(2**63)], [0]),
        "must rise from 0 to 1",
    ),
    "falling row pointers": (sparse((3, 4), [0, 2, 1, 2], [0, 1]), "must rise from 0 to 2"),
    "row pointers that start late": (sparse((1, 4), [1, 2], [0, 1]), "runs from 1 to 2"),
    "row pointers that end early": (sparse((1, 4), [0, 1], [0, 1]), "runs from 0 to 1"),
    "a negative column": (sparse((1, 4), [0, 1], [-1]), "has -1; columns are 0 to 3"),
    "a column past the shape": (sparse((1, 4), [0, 1], [4]), "has 4; columns are 0 to 3"),
    "a column twice in a row": (sparse((1, 4), [0, 2], [1, 1]), "increase within a row"),
    "falling columns": (sparse((1, 4), [0, 2], [2, 1]), "increase within a row"),
    "more columns than values": (sparse((1, 4), [0, 1], [0], [1, 2]), "1 entries for 2 values"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_tensor_is_refused_by_its_place(case: str) -> None:
    message, finding = MALFORMED[case]

    with pytest.raises(ContentRefused, match=finding) as refused:
        decode_training(with_input(message), PROTOBUF_CONTENT_TYPE)

    assert str(refused.value).startswith("data[1].loss_fn_inputs['weights']")
    assert refused.value.envelope == Envelope(model_id="run", seq_id=7)


def test_columns_may_fall_from_one_row_to_the_next() -> None:
    body = with_input(sparse((3, 4), [0, 1, 1, 2], [3, 0], [5.0, 6.0]))
    arrived = decode_training(body, PROTOBUF_CONTENT_TYPE).request.data[1].loss_inputs["weights"]

    assert arrived.tolist() == [[0, 0, 0, 5], [0, 0, 0, 0], [6, 0, 0, 0]]


def test_a_sparse_tensor_may_only_unpack_to_so_much() -> None:
    rows = MAX_DENSE_CELLS // MAX_TARGETS + 1
    body = with_input(sparse((rows, MAX_TARGETS), [0] * (rows + 1), []))

    with pytest.raises(ContentRefused, match=f"left of the {MAX_DENSE_CELLS}"):
        decode_training(body, PROTOBUF_CONTENT_TYPE)


def test_the_sparse_tensors_of_a_request_count_together() -> None:
    budget = CellBudget(limit=10)
    four = FlatTensor(
        values=np.zeros(0), shape=(2, 2), crow=np.zeros(3, np.int64), col=np.zeros(0, np.int64)
    )
    to_dense("a", four, budget)
    to_dense("b", four, budget)

    with pytest.raises(BadInput, match="c: unpacks to 4 cells, 2 are left of the 10"):
        to_dense("c", four, budget)


def test_a_request_of_too_many_datums_is_refused() -> None:
    body = b"\x0a\x03run" + b"\x10\x07" + b"\x1a\x00" * (MAX_DATUMS + 1)

    with pytest.raises(ContentRefused, match=f"data: has {MAX_DATUMS + 1} items; the limit is"):
        decode_training(body, PROTOBUF_CONTENT_TYPE)


def test_a_datum_of_too_many_inputs_is_refused() -> None:
    message = sdk_message(sdk_datum(1, **{f"i{n}": np.ones(1) for n in range(MAX_INPUTS + 1)}))

    with pytest.raises(ContentRefused, match=r"data\[0\].loss_fn_inputs: has 65 items"):
        decode_proto(message)


def test_tokens_that_are_no_whole_number_of_items_are_refused_by_their_chunk() -> None:
    message = sdk_message(tinker.Datum(model_input=text([1], [2])))
    # Together the two would be whole.
    message.data[0].model_input[0].encoded_text.tokens = bytes(6)
    message.data[0].model_input[1].encoded_text.tokens = bytes(6)

    with pytest.raises(ContentRefused, match=r"data\[0\].model_input\[0\].tokens: 6 bytes"):
        decode_proto(message)


def test_an_image_is_refused_by_its_datum_and_chunk() -> None:
    datum = tinker.Datum(
        model_input=tinker.ModelInput(
            chunks=[
                tinker.EncodedTextChunk(tokens=[1]),
                tinker.types.ImageChunk(data=b"png", format="png"),
            ]
        )
    )

    with pytest.raises(ContentRefused, match=r"data\[0\].model_input\[1\]: is of type 'image'"):
        decode_proto(sdk_message(datum))


@pytest.mark.parametrize("fields", [{"seq_id": 7}, {"model_id": "run"}])
def test_a_protobuf_body_without_envelope_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"model_id|seq_id") as refused:
        decode_proto(schema.ForwardBackwardRequest(**fields))
    assert not isinstance(refused.value, ContentRefused)


def test_a_negative_seq_id_is_refused() -> None:
    with pytest.raises(BadInput, match="seq_id: is -1; it must be from 1"):
        decode_proto(schema.ForwardBackwardRequest(model_id="run", seq_id=-1))


def test_bytes_that_are_no_protobuf_are_refused() -> None:
    with pytest.raises(BadInput, match="protobuf"):
        decode_training(b"\xff\xff\xff", PROTOBUF_CONTENT_TYPE)


@given(st.data())
def test_no_damage_breaks_the_reader(data: st.DataObject) -> None:
    weights = torch.zeros(4, 32)
    weights[1, 3] = 2
    body = bytearray(
        sdk_message(
            sdk_datum(4, weights=weights, target_tokens=[1, 2, 3, 4]),
            config={"a": 1.0, "b": "c"},
        ).SerializeToString()
    )
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=5)):
        body[place] = data.draw(st.integers(0, 255))
    refusal = refusal_of(bytes(body), PROTOBUF_CONTENT_TYPE)

    assert refusal is None or len(str(refusal)) < 400


@given(st.binary(max_size=60), st.sampled_from([PROTOBUF_CONTENT_TYPE, "application/json", None]))
def test_no_bytes_break_the_reader(body: bytes, content_type: str | None) -> None:
    with pytest.raises(ServiceError):
        decode_training(body, content_type)


# The JSON of SDKs before 0.25.


def json_body(
    datum: dict[str, Any] | None = None, field: str = "forward_backward_input", **content: Any
) -> bytes:
    sent = {"data": [datum] if datum else [], "loss_fn": "cross_entropy", **content}
    return orjson.dumps({field: sent, "model_id": "run", "seq_id": 7})


def json_datum(chunks: Any = (), **inputs: Any) -> dict[str, Any]:
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def decode_json(body: bytes) -> TrainingSubmission:
    return decode_training(body, "application/json")


def test_json_of_old_sdks_is_read_with_typed_and_untyped_chunks() -> None:
    chunks = [{"tokens": [1, 2]}, {"tokens": [3], "type": "encoded_text"}]
    weights = {"data": [1, 0.5, 0], "dtype": "float32", "shape": [3]}
    targets = {"data": [2, 3, 4], "dtype": "int64"}
    body = json_body(
        json_datum(chunks, weights=weights, target_tokens=targets),
        loss_fn_config={"a": 1, "b": 0.5, "c": "text"},
    )

    submission = decode_json(body)
    (datum,) = submission.request.data

    assert (submission.model_id, submission.seq_id) == ("run", 7)
    assert submission.request.backward
    assert submission.request.loss_config == {"a": 1.0, "b": 0.5, "c": "text"}
    assert (datum.tokens.dtype, datum.tokens.tolist()) == (np.int64, [1, 2, 3])
    assert datum.loss_inputs["weights"].dtype == np.float32
    assert datum.loss_inputs["weights"].tolist() == [1, 0.5, 0]
    assert datum.loss_inputs["target_tokens"].dtype == np.int64
    assert datum.loss_inputs["target_tokens"].tolist() == [2, 3, 4]


def test_the_forward_call_of_old_sdks_computes_no_gradient() -> None:
    assert not decode_json(json_body(field="forward_input")).request.backward


def test_explicit_nulls_are_absent_fields() -> None:
    weights = {"data": [1.0], "dtype": "float32", "shape": None, "sparse_crow_indices": None}
    body = json_body(json_datum([{"tokens": [1]}], weights=weights), loss_fn_config=None)

    assert decode_json(body).request.data[0].loss_inputs["weights"].tolist() == [1.0]


@given(arrays.filter(lambda a: a.dtype == np.int64 or np.isfinite(a).all()))
def test_json_tensors_made_by_the_sdk_arrive_as_they_were(array: np.ndarray) -> None:
    sent = sdk_datum(w=array).loss_fn_inputs["w"]
    body = json_body(json_datum(w={"data": sent.data, "dtype": sent.dtype, "shape": sent.shape}))

    np.testing.assert_array_equal(decode_json(body).request.data[0].loss_inputs["w"], array)


def test_sparse_json_tensors_arrive_dense() -> None:
    tensor = {
        "data": [5.0],
        "dtype": "float32",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [2],
    }
    arrived = decode_json(json_body(json_datum(w=tensor))).request.data[0].loss_inputs["w"]

    assert arrived.tolist() == [[0, 0, 0], [0, 0, 5]]


def weights(**fields: Any) -> dict[str, Any]:
    return json_datum(weights={"data": [1.0], "dtype": "float32", **fields})


W = r"data\[0\].loss_fn_inputs\['weights'\]"
MALFORMED_JSON = {
    "text for a number": (weights(data=[1, "2"]), rf"{W}.data\[1\]: .* got '2'"),
    "a boolean for a number": (weights(data=[True]), rf"{W}.data\[0\]"),
    "null for a number": (weights(data=[None]), rf"{W}.data\[0\]"),
    "nested lists": (weights(data=[[1.0]]), rf"{W}.data\[0\]"),
    "a fraction for an integer": (weights(dtype="int64", data=[1.5]), rf"{W}.data\[0\]"),
    "an integer beyond 64 bits": (weights(dtype="int64", data=[2**63]), rf"{W}.data\[0\]"),
    "an unknown dtype": (weights(dtype="float64"), "dtype.*got 'float64'"),
    "no data": (json_datum(weights={"dtype": "float32"}), "data: is missing"),
    "a shape of another size": (weights(shape=[2]), rf"{W}: shape \[2\] holds 2 values, 1"),
    "half a sparse tensor": (weights(sparse_col_indices=[0]), "needs both"),
    "an image": (
        json_datum([{"tokens": [1]}, {"type": "image", "data": "", "format": "png"}]),
        r"data\[0\].model_input.chunks\[1\]: is of type 'image'",
    ),
    "a chunk without tokens": (json_datum([{"data": "x"}]), r"chunks\[0\]: has no tokens"),
    "a token that is text": (json_datum([{"tokens": ["1"]}]), r"chunks\[0\].tokens\[0\]"),
    "no model input": ({"loss_fn_inputs": {}}, "model_input: is missing"),
}


@pytest.mark.parametrize("case", MALFORMED_JSON)
def test_malformed_json_content_is_refused_by_its_place(case: str) -> None:
    datum, finding = MALFORMED_JSON[case]

    with pytest.raises(ContentRefused, match=finding) as refused:
        decode_json(json_body(datum))

    assert refused.value.envelope == Envelope(model_id="run", seq_id=7)


def test_a_number_beyond_float32_becomes_infinite_for_the_validation_to_name() -> None:
    arrived = decode_json(json_body(weights(data=[1e300]))).request.data[0].loss_inputs["weights"]

    assert math.isinf(arrived[0])


def test_a_config_value_of_another_kind_is_refused() -> None:
    with pytest.raises(ContentRefused, match=r"loss_fn_config\['a'\]: is \[1\]"):
        decode_json(json_body(loss_fn_config={"a": [1]}))


def test_json_without_content_is_refused_for_its_run() -> None:
    with pytest.raises(ContentRefused, match="forward_backward_input") as refused:
        decode_json(b'{"model_id": "run", "seq_id": 7}')
    assert refused.value.envelope.seq_id == 7


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"seq_id": 1}',
        b'{"model_id": "run"}',
        b'{"model_id": "run", "seq_id": null}',
        b'{"model_id": "run", "seq_id": -1}',
        b'{"model_id": "run", "seq_id": 1.5}',
        b'{"model_id": "run", "seq_id": true}',
        b'{"model_id": "run", "seq_id": 99999999999}',
        b'{"model_id": "", "seq_id": 1}',
        b"[" * 100_000,
        b'{"model_id": "run", "seq_id": ' + b"9" * 5000 + b"}",
    ],
)
def test_json_without_envelope_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput) as refused:
        decode_json(body)

    assert not isinstance(refused.value, ContentRefused)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", [b"9" * 400, b"1" + b"0" * 4000 + b".5", b"1e999", b"NaN"])
def test_numbers_of_any_size_are_read_or_refused(value: bytes) -> None:
    body = json_body(weights(data=[12345])).replace(b"12345", value)
    try:
        arrived = decode_json(body).request.data[0].loss_inputs["weights"]
    except ServiceError:
        return
    assert not np.isfinite(arrived).any()


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.data(), json_values)
def test_no_json_value_in_any_place_breaks_the_reader(data: st.DataObject, value: Any) -> None:
    tree = orjson.loads(json_body(weights(shape=[1]), loss_fn_config={"a": 1}))
    place: Any = tree
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else [0]))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = value
    refusal = refusal_of(orjson.dumps(tree), "application/json")

    assert refusal is None or len(str(refusal)) < 400
