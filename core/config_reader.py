"""Typed look-ups in a parsed `config.json` that note every problem instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError, Problem, nearest
from .parsing import ParseError, parse_json

REQUIRED = object()


class ConfigReader:
    """Reads `data`; a wrong or missing value is noted and a harmless one returned, so that reading can go on."""

    def __init__(
        self, data: Mapping[str, Any], source: str, prefix: str = "", problems: list[Problem] | None = None
    ) -> None:
        self.data = data
        self.source = source
        self.problems: list[Problem] = [] if problems is None else problems
        self._prefix = prefix

    def under(self, key: str) -> ConfigReader:
        """Return a reader of the object at `key` that notes its problems here; an empty object if there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.problem(key, f"must be an object, got {value!r}")
            value = None
        return ConfigReader(value or {}, self.source, f"{self._prefix}{key}.", self.problems)

    def with_data(self, data: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of other data at the same place, which notes its problems here."""
        return ConfigReader(data, self.source, self._prefix, self.problems)

    def problem(self, key: str, message: str) -> None:
        """Note what is wrong at `key`, once however often it is looked up."""
        problem = Problem(self._prefix + key, message)
        if problem not in self.problems:
            self.problems.append(problem)

    def raise_problems(self) -> None:
        """Raise ConfigError if anything was noted."""
        if self.problems:
            raise ConfigError(self.source, self.problems)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> int:
        """Read a whole number ≥ `minimum`; null counts as absent."""
        value = self.data.get(key)
        if value is None:
            if default is not REQUIRED:
                return default
            self.problem(key, f"is missing{'' if key in self.data else nearest(key, self.data)}")
        elif isinstance(value, bool) or not isinstance(value, int):
            self.problem(key, f"must be a whole number, got {value!r}")
        elif value < minimum:
            self.problem(key, f"must be at least {minimum}, got {value}")
        else:
            return value
        return minimum

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Read a positive number; null counts as absent."""
        value = self.data.get(key)
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
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, got {value!r}")
            return default
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Read a list of whole numbers ≥ 0; empty if there is none."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            self.problem(key, f"must be a list of whole numbers ≥ 0, got {value!r}")
            return ()
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read a token id or a list of them."""
        value = self.data.get(key)
        if type(value) is int and value >= 0:
            return (value,)
        return self.integers(key)


def read_json_object(path: str, read_file: Callable[[str], str], *, with_infinity: bool = False) -> dict[str, Any]:
    """Parse the JSON object in `path`, whose text `read_file` returns or refuses with ConfigError; `with_infinity`: see `parse_json`.

    Raises ConfigError.
    """
    try:
        data = parse_json(read_file(path), with_infinity=with_infinity)
    except ParseError as error:
        raise ConfigError(path, [Problem("", f"is not JSON: {error}")]) from None
    if not isinstance(data, dict):
        raise ConfigError(path, [Problem("", f"must hold a JSON object, not {type(data).__name__}")])
    return data
