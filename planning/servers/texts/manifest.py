"""The containers of a manifest, of Kubernetes or of Compose, as statements of a shell: `docker run IMAGE WORDS`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ....core.errors import ConfigError
from .kserve import without_kserve
from .words import Script, add_statement
from .yaml_text import parse_yaml

_REPLICAS = ("replicas", "replicaCount", "minReplicas", "scale")  # of Kubernetes, Helm, KServe and Compose
_ROLES = ("prefill", "decode")
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
    documents = parse_yaml(text, source, as_text=True)
    files = {name: data for one in documents for name, data in _config_maps(one)}
    for document in without_kserve(documents):
        if isinstance(document, list) and all(isinstance(word, str) for word in document):
            document = {"args": document}  # the arguments alone
        for container, around in _containers(document, _Around()):
            given = container.get("env", container.get("environment"))
            variables = {"LWS_GROUP_SIZE": around.nodes, **_environment(given)}
            script = Script(variables=variables, replicas=around.replicas, role=around.role)
            script.written |= _mounted(container, around.volumes, files)
            words = [word for key in ("entrypoint", "command", "args") for word in _words(container.get(key), source)]
            if container.get("modelCommand") == "vllmServe":
                words = [*_llm_d_words(document, around), *words]
            # Without a command of its own a container runs that of its image, with these words as arguments. What
            # Kubernetes calls command, in a container with a name, Compose calls entrypoint.
            own = "command" if "name" in container else "entrypoint"
            starts_itself = own not in container and not ("command" in container and "args" in container)
            starts_itself = starts_itself and "modelCommand" not in container
            image = container.get("image")
            if isinstance(image, str):
                words = ["docker", "run", *([] if starts_itself else ["--entrypoint"]), image, *words]
            add_statement(script, words, source)
            scripts.append(script)
    return scripts


class _Around(NamedTuple):
    """What stands around a container: the size of its group of nodes, the volumes of its pod, how many of them there
    are, their pool, and the devices that llm-d's chart gives them."""

    nodes: str | None = None
    volumes: Sequence[Any] = ()
    replicas: str | None = None
    role: str | None = None
    parallelism: Mapping[str, Any] = {}

    def inside(self, value: Mapping[str, Any]) -> _Around:
        """Return what stands around the values of this object."""
        size = value.get("size" if "workerTemplate" in value else "podGroupSize")
        volumes = value.get("volumes") if "containers" in value else None
        counts = (one.get(key) for one in (value, _inner(value, "deploy")) for key in _REPLICAS)
        names = (one.get("name") for one in (value, _inner(value, "metadata")))
        return _Around(
            size if isinstance(size, str) else self.nodes,
            volumes if isinstance(volumes, list) else self.volumes,
            next((count for count in counts if isinstance(count, str)), self.replicas),
            next((role for name in names if (role := _role(name))), self.role),
            _inner(value, "parallelism") or self.parallelism,
        )


def _llm_d_words(document: Any, around: _Around) -> list[str]:
    """Return the words that llm-d's chart puts before the arguments of a container."""
    model = _inner(document, "modelArtifacts").get("name") if isinstance(document, dict) else None
    names = {"tensor": "--tensor-parallel-size", "data": "--data-parallel-size"}
    sizes = [(name, around.parallelism.get(key)) for key, name in names.items()]
    given = [word for name, size in sizes if isinstance(size, str) and size != "1" for word in (name, size)]
    return ["vllm", "serve", *([model] if isinstance(model, str) else []), *given]


def _role(name: Any) -> str | None:
    """Return the pool that a name says; None if it says none, or both."""
    found = [role for role in _ROLES if isinstance(name, str) and role in name.lower()]
    return found[0] if len(found) == 1 else None


def _containers(value: Any, around: _Around) -> Iterator[tuple[Mapping[str, Any], _Around]]:
    """Yield the objects that have words of a command, from the outside to the inside, each with what is around it."""
    if isinstance(value, list):
        for item in value:
            yield from _containers(item, around)
    elif isinstance(value, dict):
        inside = around.inside(value)
        if any(isinstance(value.get(key), list | str) for key in ("args", "command")):
            yield value, inside
        for key, item in value.items():
            one = inside._replace(role=_role(key) or inside.role)
            if key == "workerTemplate" and "leaderTemplate" in value:
                one = one._replace(replicas="0")  # the leader stands for its group
            yield from _containers(item, one)


def _config_maps(document: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the name and the files of a ConfigMap."""
    if isinstance(document, dict) and document.get("kind") == "ConfigMap":
        name, data = (_inner(document, key) for key in ("metadata", "data"))
        yield str(name.get("name")), {file: text for file, text in data.items() if isinstance(text, str)}


def _mounted(
    container: Mapping[str, Any], volumes: Sequence[Any], files: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the files of ConfigMaps by their paths in a container."""
    names = {one.get("name"): _inner(one, "configMap").get("name") for one in volumes if isinstance(one, dict)}
    mounts = container.get("volumeMounts")
    found: dict[str, str] = {}
    for mount in mounts if isinstance(mounts, list) else ():
        if isinstance(mount, dict) and isinstance(mount.get("name"), str):
            folder = str(mount.get("mountPath")).rstrip("/")
            known = files.get(str(names.get(mount["name"])), {})
            found |= {f"{folder}/{file}": text for file, text in known.items()}
    return found


def _inner(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, dict) else {}


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
