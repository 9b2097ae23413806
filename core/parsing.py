"""JSON and TOML from outside, parsed with limits.

Every text that a user gives passes through `parse_json` or `parse_toml`, so that readers of the values need not expect
absurd ones. A file that another program wrote may have longer integers than a request or a scenario, in keys that
this project does not read: `transformers` writes int(1e30) for a tokenizer without a greatest length.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeGuard, overload

from .errors import ConfigError, Problem, nearest, shown

MAX_DEPTH = 64
MAX_INTEGER = 2**64 - 1
"""The greatest absolute value of an integer: 64 bits, without their sign."""
MAX_DIGITS = len(str(MAX_INTEGER))

_OPENING_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

PairsHook = Callable[[list[tuple[str, Any]]], Any]


class ParseError(ValueError):
    """A text that is not of its format, or exceeds a limit;
    the message says what was found, and where if that is known."""


def parse_json(
    text: str, pairs_hook: PairsHook | None = None, *, with_infinity: bool = False, long_integers: bool = False
) -> Any:
    """Return the value of a JSON text. `pairs_hook` makes an object from its pairs, as in `json.loads`.
    `with_infinity`: take Infinity and -Infinity, which Python writes into the configurations of some models, for
    numbers. `long_integers`: take integers of more than 64 bits, for a file of another program; with `with_infinity`,
    too, a number beyond every float is infinite.

    Raises ParseError for a text that is no JSON, for NaN and Infinity, and for half of a surrogate pair. Also for
    nesting deeper than MAX_DEPTH, for an integer beyond ±MAX_INTEGER, and for a number too large for a float.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(text)
    try:
        value = _decoder(pairs_hook, with_infinity, long_integers).decode(text)
    except json.JSONDecodeError as error:
        raise ParseError(f"{error.msg} ({_place(text, error.pos)})") from None
    except _Refused as error:
        raise ParseError(f"{error.message} ({_place(text, text.find(error.found))})") from None
    if _ESCAPED_SURROGATE.search(text):
        _check_unicode(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ParseError for a text that is no TOML, and beyond the limits
    of `parse_json`."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ParseError(f"nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:  # also for an integer of thousands of digits
        raise ParseError(str(error)) from None
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
        for item in level:
            if isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise ParseError(f"an integer of {item.bit_length()} bits; expected one of 64 bits")
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise ParseError(f"nested more than {MAX_DEPTH} deep")
    return value


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of `pairs`, a hook for `parse_json`.
    Raises ParseError if a key is written twice: one of its values would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ParseError(f"{next(name for name in names if names.count(name) > 1)!r} is written twice")
    return value


class _Refused(Exception):
    """A number beyond the limits, as it is written."""

    def __init__(self, found: str, message: str) -> None:
        super().__init__(found, message)
        self.found, self.message = found, message


def _place(text: str, position: int) -> str:
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    return f"line {line} column {column}" if "\n" in text.rstrip("\n") else f"column {column}"


def _decoder(pairs_hook: PairsHook | None, with_infinity: bool, long_integers: bool) -> json.JSONDecoder:
    if pairs_hook is None and not with_infinity:
        return _OF_FILES if long_integers else _PLAIN
    return _new_decoder(pairs_hook, with_infinity, long_integers)


def _new_decoder(
    pairs_hook: PairsHook | None = None, with_infinity: bool = False, long_integers: bool = False
) -> json.JSONDecoder:
    beyond_floats = with_infinity and long_integers
    return json.JSONDecoder(
        object_pairs_hook=pairs_hook,
        parse_int=partial(_long_integer, beyond_floats) if long_integers else _integer,
        parse_float=float if beyond_floats else _fraction,
        parse_constant=_infinity if with_infinity else _constant,
    )


def _integer(digits: str) -> int:
    if len(digits) < MAX_DIGITS:
        return int(digits)
    if len(digits) > MAX_DIGITS + 1 or abs(int(digits)) > MAX_INTEGER:
        raise _Refused(digits, f"an integer of {len(digits.lstrip('-'))} digits; expected one of 64 bits")
    return int(digits)


def _long_integer(beyond_floats: bool, digits: str) -> int | float:
    """Return an integer of any length that a float has room for, so that readers can convert and print it."""
    if len(digits) < MAX_DIGITS:
        return int(digits)
    value = float(digits) if beyond_floats else _fraction(digits)
    return value if math.isinf(value) else int(digits)


def _fraction(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused(digits, f"the number {digits[:20]} is too large")
    return value


def _constant(name: str) -> float:
    raise _Refused(name, f"{name} is no JSON number")


def _infinity(name: str) -> float:
    return float(name) if name != "NaN" else _constant(name)


_PLAIN = _new_decoder()
_OF_FILES = _new_decoder(long_integers=True)


def _check_depth(text: str) -> None:
    depth = 0
    for match in _OPENING_OR_TEXT.finditer(text):
        found = match.group()
        if found in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ParseError(f"nested more than {MAX_DEPTH} deep ({_place(text, match.start())})")
        elif found in "]}":
            depth -= 1


def _check_unicode(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ParseError(f"half of a surrogate pair in the text {value[:20]!r}") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_unicode(name)
            _check_unicode(item)
    elif isinstance(value, list):
        for item in value:
            _check_unicode(item)


# -- look-ups in a parsed configuration -------------------------------------------------------------------------------


class Required(Enum):
    """The default of a key that has none."""

    REQUIRED = "required"


REQUIRED = Required.REQUIRED


class ConfigReader:
    """Reads `data`; a wrong or missing value is noted and a harmless one returned, so that reading can go on. `read`:
    the keys that were asked for, of objects within objects with the keys of these."""

    def __init__(
        self,
        data: Mapping[str, Any],
        source: str,
        prefix: str = "",
        problems: list[Problem] | None = None,
        read: set[str] | None = None,
    ) -> None:
        self.data = data
        self.source = source
        self.problems: list[Problem] = [] if problems is None else problems
        self.read: set[str] = set() if read is None else read
        self._prefix = prefix

    def under(self, key: str) -> ConfigReader:
        """Return a reader of the object at `key` that notes its problems here; an empty object if there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.problem(key, f"must be an object, got {value!r}")
            value = None
        return ConfigReader(value or {}, self.source, f"{self._prefix}{key}.", self.problems, self.read)

    def with_data(self, data: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of other data at the same place, which notes its problems here."""
        return ConfigReader(data, self.source, self._prefix, self.problems, self.read)

    def unread(self) -> Iterator[str]:
        """Yield the keys of this object that were not asked for."""
        yield from (key for key in self.data if self._prefix + key not in self.read)

    def problem(self, key: str, message: str) -> None:
        """Note a problem at `key`, once even if the key is read several times."""
        problem = Problem(self._prefix + key, message)
        if problem not in self.problems:
            self.problems.append(problem)

    def raise_problems(self) -> None:
        """Raise ConfigError if anything was noted."""
        if self.problems:
            raise ConfigError(self.source, self.problems)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(self._prefix + key)
        return self.data.get(key, default)

    @overload
    def integer(self, key: str, default: int | Required = ..., minimum: int = 1) -> int: ...
    @overload
    def integer(self, key: str, default: None, minimum: int = 1) -> int | None: ...
    def integer(self, key: str, default: int | Required | None = REQUIRED, minimum: int = 1) -> int | None:
        """Read a whole number ≥ `minimum`; null counts as absent."""
        value = self.get(key)
        if value is None:
            if default is not REQUIRED:
                return default
            self.problem(key, f"is missing{'' if key in self.data else nearest(key, self.data)}")
        elif isinstance(value, bool) or not isinstance(value, int):
            self.problem(key, f"must be a whole number, got {value!r}")
        elif not minimum <= value <= MAX_INTEGER:
            bound = f"at least {minimum}" if value < minimum else "an integer of 64 bits"
            self.problem(key, f"must be {bound}, got {shown(value)}")
        else:
            return value
        return minimum

    @overload
    def number(self, key: str, default: float | Required = ...) -> float: ...
    @overload
    def number(self, key: str, default: None) -> float | None: ...
    def number(self, key: str, default: float | Required | None = REQUIRED) -> float | None:
        """Read a positive number; null counts as absent."""
        value = self.get(key)
        if value is None:
            if default is not REQUIRED:
                return default
            self.problem(key, "is missing")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.problem(key, f"must be a positive number, got {value!r}")
        else:
            return float(value)
        return 1.0

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, got {value!r}")
            return default
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Read a list of whole numbers ≥ 0; empty if there is none."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(map(_is_count, value)):
            self.problem(key, f"must be a list of whole numbers ≥ 0, got {value!r}")
            return ()
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read a token id or a list of them."""
        value = self.get(key)
        if _is_count(value):
            return (value,)
        return self.integers(key)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def read_json_object(path: str, read_file: Callable[[str], str], *, of_checkpoint: bool = False) -> dict[str, Any]:
    """Parse the JSON object in `path`, whose text `read_file` returns or refuses with ConfigError. `of_checkpoint`: it
    may have integers of any length and infinity, as `parse_json` takes both.

    Raises ConfigError.
    """
    try:
        data = parse_json(read_file(path), with_infinity=of_checkpoint, long_integers=of_checkpoint)
    except ParseError as error:
        raise ConfigError.of(path, "", f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError.of(path, "", f"must hold a JSON object, not {type(data).__name__}")
    return data
