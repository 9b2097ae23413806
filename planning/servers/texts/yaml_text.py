"""YAML from outside, parsed with limits: no aliases, because a short text could expand to a huge one, and no key twice,
because one of its values would be lost."""

from __future__ import annotations

from typing import Any

import yaml

from ....core.errors import ConfigError
from ....core.parsing import MAX_DEPTH

MAX_YAML = 1 << 20  # characters


class _Strict:
    """Refuses aliases, keys that are given twice, and deep nesting; the base of loaders."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]
            raise yaml.YAMLError("an alias (*) is not read; write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)  # type: ignore[misc]
        self.depth -= 1
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        return node


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value!r} is written twice")
            seen.add(key.value)


class _Loader(_Strict, yaml.SafeLoader):
    """Makes numbers, truth values and texts."""


class _TextLoader(_Strict, yaml.BaseLoader):
    """Makes texts alone, as the words of a command are."""


def parse_yaml(text: str, source: str, *, as_text: bool = False) -> list[Any]:
    """Return the documents of a YAML text. `as_text`: numbers and truth values stay as they are written. Raises
    ConfigError for a text that is no YAML, that has an alias or a key twice, or that is too long or too deep."""
    if len(text) > MAX_YAML:
        raise ConfigError.of(source, "", f"has more than {MAX_YAML:,} characters, which no such file has")
    try:
        return list(yaml.load_all(text, _TextLoader if as_text else _Loader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ConfigError.of(source, "", f"is no YAML that is read: {message}") from None
