"""Our message table against the SDK's own descriptors."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from tinker.proto import tinker_public_pb2

from server.wire import schema

OURS: Any = schema.ForwardBackwardRequest.DESCRIPTOR.file
THEIRS: Any = tinker_public_pb2.DESCRIPTOR


def type_name(field: FieldDescriptor) -> str | None:
    described = field.message_type or field.enum_type
    return described.full_name.partition(".")[2] if described else None


def fields(message: Any) -> dict[str, tuple[object, ...]]:
    """What decides how a field travels."""
    return {
        field.name: (
            field.number,
            field.type,
            type_name(field),
            field.is_repeated,
            field.has_presence,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in message.fields
    }


@pytest.mark.parametrize("name", schema.MESSAGES)
def test_every_message_has_the_fields_of_the_sdk(name: str) -> None:
    assert fields(OURS.message_types_by_name[name]) == fields(THEIRS.message_types_by_name[name])


@pytest.mark.parametrize("name", schema.MESSAGES)
def test_every_map_has_the_entries_of_the_sdk(name: str) -> None:
    ours = OURS.message_types_by_name[name].nested_types_by_name
    theirs = THEIRS.message_types_by_name[name].nested_types_by_name

    assert {n: fields(entry) for n, entry in ours.items()} == {
        n: fields(entry) for n, entry in theirs.items()
    }
    assert all(entry.GetOptions().map_entry for entry in ours.values())


def test_enums_have_the_values_of_the_sdk() -> None:
    def values(file: Any) -> dict[str, dict[str, int]]:
        return {
            name: {value.name: value.number for value in enum.values}
            for name, enum in file.enum_types_by_name.items()
        }

    assert values(OURS) == values(THEIRS)
    assert values(OURS)["StopReason"] == {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}


def test_only_messages_the_client_never_sends_are_left_out() -> None:
    assert set(THEIRS.message_types_by_name) - set(schema.MESSAGES) == {
        "SamplingParams",
        "StopStrings",
        "StopTokens",
    }


def test_the_messages_are_in_a_package_of_their_own() -> None:
    assert schema.Tensor.DESCRIPTOR.full_name == "hearth.Tensor"
    assert schema.Tensor is not tinker_public_pb2.Tensor
