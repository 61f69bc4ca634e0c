"""What the OpenAPI schema says of the request bodies, which the handlers read themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from server.wire.training import PROTOBUF_CONTENT_TYPE

_DEFINITION = "#/$defs/"


def takes(model: type[BaseModel], *, protobuf: bool = False) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is the model; or the same as a protobuf message,
    which OpenAPI has no words for."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    if protobuf:
        content[PROTOBUF_CONTENT_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema without references: theirs would be read from the root of the whole document."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        rest = {name: part for name, part in schema.items() if name != "$ref"}
        schema = {**definitions[reference.removeprefix(_DEFINITION)], **rest}
    return {name: _inlined(part, definitions) for name, part in schema.items()}
