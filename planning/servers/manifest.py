"""The containers of a manifest, of Kubernetes or of Compose, as statements of a shell: `docker run IMAGE WORDS`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import ConfigError
from .words import Script, add_statement
from .yaml_text import parse_yaml

_KEY_OR_ITEM = re.compile(r"---|[\"']?[A-Za-z][\w./-]*[\"']?:(\s.*)?|- .*")


def is_manifest(text: str) -> bool:
    """Return whether a text is YAML instead of words of a shell: whether its first line is a key or an item."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _KEY_OR_ITEM.fullmatch(first) is not None


def read_manifest(text: str, source: str) -> list[Script]:
    """Return the command of each container. Raises ConfigError for a text that is no YAML, and for words that are
    none."""
    scripts = []
    for document in parse_yaml(text, source, as_text=True):
        if isinstance(document, list) and all(isinstance(word, str) for word in document):
            document = {"args": document}  # the arguments alone
        for container, nodes in _containers(document):
            given = container.get("env", container.get("environment"))
            script = Script(variables={"LWS_GROUP_SIZE": nodes, **_environment(given)})
            words = [word for key in ("entrypoint", "command", "args") for word in _words(container.get(key), source)]
            # Without a command of its own a container runs that of its image, with these words as arguments. What
            # Kubernetes calls command, in a container with a name, Compose calls entrypoint.
            own = "command" if "name" in container else "entrypoint"
            starts_itself = own not in container and not ("command" in container and "args" in container)
            image = container.get("image")
            if isinstance(image, str):
                words = ["docker", "run", *([] if starts_itself else ["--entrypoint"]), image, *words]
            add_statement(script, words, source)
            scripts.append(script)
    return scripts


def _containers(value: Any, nodes: str | None = None) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Yield the objects that have words of a command, from the outside to the inside, each with the size of the
    LeaderWorkerSet around it."""
    if isinstance(value, list):
        for item in value:
            yield from _containers(item, nodes)
    elif isinstance(value, dict):
        if any(isinstance(value.get(key), list | str) for key in ("args", "command")):
            yield value, nodes
        size = value.get("size") if "workerTemplate" in value else None
        for item in value.values():
            yield from _containers(item, size if isinstance(size, str) else nodes)


def _words(value: Any, source: str) -> list[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ConfigError.of(source, "", f"cannot be read as a command: {error}") from None
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _environment(given: Any) -> dict[str, str | None]:
    """Return the variables of a container; those whose value comes from elsewhere have none."""
    if isinstance(given, dict):  # Compose
        return {name: value for name, value in given.items() if isinstance(value, str)}
    items = given if isinstance(given, list) else []
    named = {item["name"]: item.get("value") for item in items if isinstance(item, dict) and "name" in item}
    return {name: value if isinstance(value, str) else None for name, value in named.items() if isinstance(name, str)}
