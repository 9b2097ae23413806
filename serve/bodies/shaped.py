"""JSON that follows a schema, with one place for the words of an output: what a simulated body, which has no model,
answers where a request wants JSON or demands the call of a function."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any

import numpy as np

from ...core.errors import InvalidRequest
from ..base.port import TextCodec

MAX_VALUES = 1000
"""Values of one JSON: a schema may ask for more than its own length, by references and numbers of items."""
NAMES_OF_A_VALUE = 100
"""Names of properties that count as one value more where parts of a schema are merged."""
MAX_DEPTH = 64
MAX_FRAME = 1 << 16
"""Characters of a JSON, beside the words."""
_WORDS = object()
"""In the value of a schema: where the words are."""
_FORMATS = {
    "date": "2026-01-01", "time": "00:00:00Z", "date-time": "2026-01-01T00:00:00Z", "email": "a@example.com",
    "uri": "https://example.com", "uuid": "00000000-0000-4000-8000-000000000000", "ipv4": "192.0.2.1",
}  # fmt: skip


def frame_of(schema: Any) -> tuple[str, str]:
    """Return the JSON before the words and after them; without a place for words, all of it and an empty text.

    An object has what it requires; a value is the first of those that are listed, or an empty one. The words are the
    first text that may be any. Patterns are not followed. Raises InvalidRequest for a schema that is none, or asks for
    more than MAX_VALUES values."""
    try:
        pieces = list(_pieces(_Sample(schema).value(schema)))
    except ValueError:
        raise InvalidRequest("the schema has a number that JSON does not have") from None
    place = pieces.index(None) if None in pieces else len(pieces)
    before, after = ("".join(filter(None, some)) for some in (pieces[:place], pieces[place:]))
    if len(before) + len(after) > MAX_FRAME:
        raise InvalidRequest(f"the schema asks for more than {MAX_FRAME} characters")
    return before, after


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens of JSON before the words and after them, int64 [n] each; without words all are before."""

    before: np.ndarray
    after: np.ndarray
    has_words: bool

    @classmethod
    def of_text(cls, text: str, codec: TextCodec) -> Frame:
        """Return the frame of a schema's JSON. An object of any keys has one text. Raises InvalidRequest."""
        schema = json.loads(text)
        parts = frame_of({"required": ["text"]} if schema == {"type": "object"} else schema)
        before, after = (codec.encode(part, add_special_tokens=False) for part in parts)
        return cls(before, after, has_words=bool(parts[1]))

    def length(self, drawn: int, most: int) -> int:
        """Return the tokens of an output that would have `drawn` ones without a frame: `most` at most, unless the frame
        with one word has more."""
        fixed = len(self.before) + len(self.after)
        return max(min(drawn, most), fixed + 1) if self.has_words else fixed

    def put(self, tokens: np.ndarray, first: int, length: int) -> None:
        """Write what of the frame is among `tokens`, which are those from `first` on of an output of this length."""
        for part, begin in ((self.before, 0), (self.after, length - len(self.after))):
            low, high = max(begin, first), min(begin + len(part), first + len(tokens))
            if low < high:
                tokens[low - first : high - first] = part[low - begin : high - begin]


def _pieces(value: Any) -> Iterator[str | None]:
    """Yield the JSON of a value, with None in the place of the words. Raises ValueError for a number that JSON does not
    have."""
    if value is _WORDS:
        yield from ('"', None, '"')
    elif isinstance(value, dict):
        yield "{"
        for number, (name, one) in enumerate(value.items()):
            yield f"{', ' if number else ''}{quote(name)}: "
            yield from _pieces(one)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, one in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(one)
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)


class _Sample:
    """Makes one value of a schema and its parts."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_VALUES
        self._has_words = False

    def value(self, schema: Any, depth: int = 0) -> Any:
        self._count(depth)
        if isinstance(schema, bool):
            schema = {}
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"expected a schema, found {json.dumps(schema)[:80]}")
        if "const" in schema or "enum" in schema:
            chosen = schema["const"] if "const" in schema else _first(schema["enum"])
            self._left -= len(json.dumps(chosen)) // 64  # a long one counts as several
            return chosen
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                options = [one for one in _list(schema, key) if one != {"type": "null"}]
                return self.value(_first(options or _list(schema, key)), depth + 1)
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth + 1)
        if schema.get("allOf"):
            return self.value(self._merged(schema, depth), depth + 1)
        kind = schema.get("type")
        kind = next((one for one in kind if one != "null"), "null") if isinstance(kind, list) else kind
        if kind is None:
            kind = (
                "object"
                if "properties" in schema or "required" in schema
                else "array"
                if "items" in schema
                else "string"
            )
        return self._of_kind(kind, schema, depth)

    def _merged(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return one schema in the place of a schema and the parts of its allOf, which all hold: with the properties
        and the required names of all of them."""
        merged: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: list[Any] = []
        for part in (*_list(schema, "allOf"), {key: one for key, one in schema.items() if key != "allOf"}):
            self._count(depth)
            part = self._referred(part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
            if isinstance(part, Mapping):
                named, needed = _mapping(part, "properties"), _list(part, "required")
                merged |= part
                properties |= named
                required += needed
                self._left -= (len(part) + len(named) + len(needed)) // NAMES_OF_A_VALUE
        if "properties" in merged:
            merged["properties"] = properties
        if "required" in merged:
            merged["required"] = required
        return merged

    def _count(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            most = f"{MAX_VALUES} values, or for more than {MAX_DEPTH} in each other"
            raise InvalidRequest(f"the schema asks for more than {most}")

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            properties = _mapping(schema, "properties")
            return {
                name: self.value(properties.get(name) or {}, depth + 1)
                for name in dict.fromkeys(map(str, _list(schema, "required")))
            }
        if kind == "array":
            items = [*_list(schema, "prefixItems")]
            count = min(int(_number(schema, "minItems", 0)), MAX_VALUES + 1)
            items += [schema.get("items", {})] * (count - len(items))
            return [self.value(one, depth + 1) for one in items]
        if kind == "string":
            return self._text(schema)
        if kind in ("integer", "number"):
            return _least(schema, kind == "integer")
        if kind in ("boolean", "null"):
            return False if kind == "boolean" else None
        raise InvalidRequest(f"a schema has the unknown type {json.dumps(kind)[:80]}")

    def _text(self, schema: Mapping[str, Any]) -> Any:
        form = schema.get("format")
        if isinstance(form, str) and form in _FORMATS:
            return _FORMATS[form]
        if not self._has_words and "maxLength" not in schema and "pattern" not in schema:
            self._has_words = True
            return _WORDS
        return "x" * min(int(_number(schema, "minLength", 0)), MAX_VALUES)

    def _referred(self, reference: Any) -> Any:
        found = self._root
        for name in str(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise InvalidRequest(f"the schema has no {reference}")
            found = found[name]
        return found


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = schema.get(key) or ()
    if not isinstance(found, list | tuple):
        raise InvalidRequest(f"{key} of a schema is no list")
    return found


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key) or {}
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{key} of a schema is no object")
    return found


def _first(values: Any) -> Any:
    if not isinstance(values, list) or not values:
        raise InvalidRequest("a schema lists no values to choose from")
    return values[0]


def _number(schema: Mapping[str, Any], key: str, default: float) -> float:
    if key not in schema:
        return default
    found = schema[key]
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= sys.float_info.max:
        raise InvalidRequest(f"{key} of a schema is no number")
    return found


def _least(schema: Mapping[str, Any], is_whole: bool) -> float:
    """Return the number nearest to 0 that a schema allows."""
    low, above = (_number(schema, key, -math.inf) for key in ("minimum", "exclusiveMinimum"))
    high, below = (_number(schema, key, math.inf) for key in ("maximum", "exclusiveMaximum"))
    if is_whole:
        least = max(low if math.isinf(low) else math.ceil(low), above if math.isinf(above) else math.floor(above) + 1)
        most = min(high if math.isinf(high) else math.floor(high), below if math.isinf(below) else math.ceil(below) - 1)
        return int(min(max(0, least), most))
    found = min(max(0, low, above), high, below)
    if found not in (above, below):
        return found
    if found == above:  # as far from it as the other end allows
        return found + min(1, (min(high, below) - found) / 2)
    return found - min(1, (found - max(low, above)) / 2)
