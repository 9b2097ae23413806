"""Finds the command of a server in a text, a script or a manifest, and reads its arguments.

Words that do not belong to the server are skipped: assignments, wrappers, `docker run` with its options. A variable
without a value is refused where a simulation depends on it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, Problem, nearest
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_text
from .command import FLAG, LIST, NEAR, Given, ServerArguments
from .texts.manifest import is_manifest, read_manifest
from .texts.words import ASSIGNMENT, Script, is_unknown, read_script

UNKNOWN = "has a variable of the shell or a placeholder; give its value"


def read_arguments(server: ServerArguments, given: str, source: str) -> Given:
    """Return the arguments of a launch command. `given`: its text, or the path of a file that has it. Raises
    ConfigError with all arguments that are unknown, that lack their value, or that have a value but take none."""
    text, folder = given, None
    if "\n" not in given and not given.lstrip().startswith("-") and os.path.isfile(given):  # False for a long text
        text, source, folder = read_text(given), given, Path(given).parent
    scripts = read_manifest(text, source) if is_manifest(text) else [read_script(text, source)]
    script, before, words, servers = _the_command(server, scripts, source, is_manifest(text))
    found = Given(
        source, written=script.written, folder=folder, servers=servers, environment=_environment(script, before)
    )
    named = next((one for word in before if (one := server.release.search(word))), None)
    found.release, found.has_image = (None, False) if named is None else (named[1], "==" not in named[0])
    if server.merges_config:
        words = _with_config(server, words, found)
    _Reader(server, words, found).read()
    found.assumed += [f"${name} is {value!r}, as the text assigns it" for name, value in script.used.items()]
    found.check()
    return found


def _environment(script: Script, before: Sequence[str]) -> dict[str, str]:
    """Return the variables that a script, a manifest or the words before a command set."""
    found = {name: value for name, value in script.variables.items() if value is not None}
    return found | {one["name"]: one["value"] for word in before if (one := ASSIGNMENT.fullmatch(word)) is not None}


def _the_command(
    server: ServerArguments, scripts: list[Script], source: str, in_manifest: bool
) -> tuple[Script, list[str], list[str], dict[str, int]]:
    """Return the script that has the server's command, the words before its arguments, the arguments, and how many
    servers a manifest starts with them, by pool. Raises ConfigError if there is no command, or if there are several
    that differ."""
    commands: list[tuple[Script, list[str], list[str]]] = []
    for script in scripts:
        for place, statement in enumerate(script.statements):
            start = server.entry(statement)
            if start is not None:
                _refuse_lost_line(script.statements[place + 1 : place + 2], source)
                earlier = [word for one in script.statements[:place] for word in one]
                commands.append((script, [*earlier, *statement[:start]], script.expand(statement[start:])))
    if commands:
        first = commands[0]
        meanings = [_what_matters(server, words) for _, _, words in commands]
        for (_, _, words), (_, own) in zip(commands, meanings, strict=True):
            if own != meanings[0][1]:
                message = (
                    f"starts {server.name} {len(commands)} times, also with {' '.join(words)[:80]!r}; give one command"
                )
                raise ConfigError.of(source, "", message)
        servers = _servers(server, commands, source)
        return *first, servers if in_manifest or len(servers) > 1 else {}
    alone = [word for script in scripts for statement in script.statements for word in statement]
    while alone and ASSIGNMENT.fullmatch(alone[0]) and alone[0][0] != "-":
        alone.pop(0)
    if not alone and not in_manifest:
        raise ConfigError.of(source, "", "is empty; expected a launch command or its arguments")
    if not alone or not alone[0].startswith("-"):
        begins = "no container of this manifest has a" if in_manifest else f"{alone[0]!r} is no"
        raise ConfigError.of(source, "", f"{begins} command of {server.name}; expected one, or its arguments alone")
    return scripts[0], [], scripts[0].expand(alone), {}


def _servers(
    server: ServerArguments, commands: Sequence[tuple[Script, list[str], list[str]]], source: str
) -> dict[str, int]:
    """Return how many servers the commands start, by pool."""
    found: dict[str, int] = {}
    for script, _, words in commands:
        text = script.replicas or "1"
        if not re.fullmatch(r"\d{1,6}", text):
            raise ConfigError.of(source, "replicas", f"is {text!r}; expected a whole number of servers")
        given = Given("")
        _Reader(server, words, given).read()
        role = server.take_role(dict(given.values)) or script.role or ""
        # Each node of an engine has a container; the replicas of a group of nodes are engines.
        is_set = script.variables.get("LWS_GROUP_SIZE") is not None
        found[role] = found.get(role, 0) + int(text) * ((given.integer("nnodes") or 1) if is_set else 1)
    nodes = given.integer("nnodes") or 1
    return {role: max(-(-number // nodes), 1) if number else 0 for role, number in found.items()}


def _what_matters(server: ServerArguments, words: list[str]) -> tuple[str | None, tuple[list[str], dict[str, Any]]]:
    """Return the pool that a command starts, and its other arguments without those that have no effect, in which the
    nodes of one engine differ."""
    found = Given("")
    _Reader(server, words, found).read()
    values = dict(found.values)
    role = server.take_role(values)
    return role, (
        found.positional,
        {name: value for name, value in values.items() if server.known[name].reason is not None},
    )


def _refuse_lost_line(following: list[list[str]], source: str) -> None:
    """Refuse a line of arguments behind the command, which the shell would not pass to the server."""
    if following and re.match(r"--?[A-Za-z]", following[0][0]):
        message = "begins a line, but the line before does not end with \\: the shell would not pass it to the server"
        raise ConfigError.of(source, following[0][0], message)


def _with_config(server: ServerArguments, words: list[str], found: Given) -> list[str]:
    """Return the arguments with those of the file that --config names in front, so that the command's own win."""
    places = [place for place, word in enumerate(words) if re.fullmatch(r"--config(=.*)?", word)]
    if not places:
        return words
    place, (_, equals, path) = places[0], words[places[0]].partition("=")
    rest = words[place + 1 :]
    if not equals:
        path, rest = (rest[0], rest[1:]) if rest else ("", [])
    if len(places) > 1 or not path or is_unknown(path):
        found.refuse("config", f"is {path!r}; expected the path of one YAML file")
        return [*words[:place], *rest]
    keys = found.options(path)
    for key in [key for key, value in keys.items() if value is None]:
        found.problems.append(Problem(f"{path}: {key}", "has no value"))
    own = [*words[:place], *rest]
    is_placed = bool(own) and not own[0].startswith("-")
    lines = [word for key, value in keys.items() if not (is_placed and key == "model") for word in _line(key, value)]
    return [*own[:1], *lines, *own[1:]] if is_placed else [*lines, *own]


def _line(key: Any, value: Any) -> list[str]:
    """Return the words that a key of a configuration file stands for."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)] if value else []
    return [f"--{key}={json.dumps(value) if isinstance(value, Mapping) else value}"]


class _Reader:
    """Takes word by word."""

    def __init__(self, server: ServerArguments, words: list[str], found: Given) -> None:
        self.server, self.words, self.found = server, words, found
        self.place = 0

    def read(self) -> None:
        while self.place < len(self.words):
            word = self.words[self.place]
            self.place += 1
            if re.match(r"--?[A-Za-z]", word):
                self._argument(word)
            elif is_unknown(word):
                self.found.problems.append(Problem(word, UNKNOWN))
            else:
                self.found.positional.append(word)
        for word in self.found.positional[1:]:
            message = f"is no argument of {self.server.name}; expected one model, and then arguments with dashes"
            self.found.problems.append(Problem(word, message))

    def _argument(self, word: str) -> None:
        head, equals, inline = re.sub(r"^-O([0-9])$", r"-O=\1", word).lstrip("-").partition("=")
        head, dot, key = head.partition(".")
        name, value = self.server.find(head), True
        if name is None and head.startswith("no-") and (positive := self.server.find(head[3:])) is not None:
            name, value = positive, False
        if name is None:
            bare = head.replace("_", "-")
            names = [f"--{one}" for one in (*self.server.known, *self.server.other_names)]
            hint = nearest(f"--{bare}", names, NEAR)
            self.found.problems.append(Problem(word.partition("=")[0], f"is no argument of {self.server.name}{hint}"))
            self._skip_values()
            return
        known = self.server.known[name]
        if known.kind == FLAG:
            if equals and inline.lower() not in ("true", "false"):
                self.found.refuse(name, f"takes no value, got {inline!r}")
            self.found.values[name] = value if not equals else inline.lower() == "true"
            return
        values = [inline] if equals else self._values(many=known.kind == LIST)
        if not values:
            self.found.refuse(name, "needs a value")
        elif known.reason == "" and any(is_unknown(one) and not one.startswith("{") for one in values):
            self.found.refuse(name, f"is {' '.join(values)!r}, which {UNKNOWN}")
        elif dot and known.reason == "" and not name.endswith("-config"):
            self.found.refuse(name, f"has no keys, got {head}.{key}")
        elif dot:
            self._assign(name, key, values[0])
        else:
            self._check_value(name, values[0])
            self.found.values[name] = values if known.kind == LIST else values[0]

    def _check_value(self, name: str, value: str) -> None:
        known = self.server.values.get(name)
        if known is not None and value not in known:
            self.found.refuse(name, f"is {value!r}{nearest(value, known)}; {self.server.name} knows {', '.join(known)}")

    def _assign(self, name: str, key: str, text: str) -> None:
        """Set a key of an argument that takes a JSON object: --name.key value."""
        table = self.found.values.setdefault(name, {})
        if not isinstance(table, dict):
            self.found.refuse(name, "is given as a whole and by its keys")
            return
        try:
            table[key.replace("-", "_")] = parse_json(text)
        except ParseError:
            table[key.replace("-", "_")] = text

    def _values(self, many: bool) -> list[str]:
        values: list[str] = []
        while self.place < len(self.words) and (many or not values):
            word = self.words[self.place]
            if re.match(r"--?[A-Za-z]", word):
                break
            values.append(word)
            self.place += 1
        return values

    def _skip_values(self) -> None:
        while self.place < len(self.words) and not self.words[self.place].startswith("-"):
            self.place += 1
