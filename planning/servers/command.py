"""What is known of a server's arguments, and the arguments that a launch command gives.

The keys of a scenario declare the arguments that they are read from and written to (`sim/scenario/flags.py: Flags`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, Problem
from ...core.parsing import ParseError, parse_json, refuse_repeated_keys
from ...observe.input_files import read_text
from .texts.yaml_text import parse_yaml

FLAG, VALUE, LIST = "flags", "values", "lists"
MAX_SIZE = 1 << 20  # the largest captured batch
NODE = 8  # devices of a node that stands alone
NEAR = 0.8  # of hundreds of names some are a little alike: only a slip is worth a hint
_KEY = re.compile(r"([{,]\s*[A-Za-z_][\w.-]*):\s*")
_SUFFIXES = {
    suffix: base**power
    for power, letter in enumerate("kmgt", 1)
    for base, suffixes in ((1000, (letter, f"{letter.upper()}B")), (1024, (letter.upper(), f"{letter.upper()}iB")))
    for suffix in suffixes
}


@dataclass(frozen=True, slots=True)
class KnownArgument:
    """An argument of a server. `reason`: why it is not modelled; None: it has no effect on timing; "":
    keys of a scenario follow."""

    kind: str
    reason: str | None


@dataclass(frozen=True)
class ServerArguments:
    """The arguments that a server accepts.

    Attributes:
        name: As messages call it.
        entry: Finds where its own arguments begin in the words of a command, None if they are not a command of this
            server.
        known: By name without dashes; `other_names` maps further names to these.
        abbreviates: Whether the beginning of a name is enough.
        release: Finds the release in a word before the server's own arguments, such as the name of an image.
        values: The values that an argument takes, of arguments for which any other one is a mistake.
        merges_config: Whether the file that --config names has arguments, over which those of the command win.
        take_role: Takes out of the values of arguments those by which servers of two pools differ. Returns the pool.
    """

    name: str
    entry: Callable[[list[str]], int | None]
    known: Mapping[str, KnownArgument]
    other_names: Mapping[str, str]
    abbreviates: bool
    release: re.Pattern[str]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    merges_config: bool = False
    take_role: Callable[[dict[str, Any]], str | None] = lambda values: None

    def find(self, word: str) -> str | None:
        """Return the name that a word without dashes means."""
        name = word.replace("_", "-")
        if name in self.other_names:
            return self.other_names[name]
        if name in self.known:
            return name
        names = [*self.known, *self.other_names]
        found = {self.other_names.get(one, one) for one in names if self.abbreviates and one.startswith(name)}
        return found.pop() if len(found) == 1 else None


def _without_its_quotes(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a shell has taken the quotes from (`{method:eagle3,k:3}`); None if it is not one."""
    if "{" not in text or '"' in text:
        return None
    try:
        (found,) = parse_yaml(_KEY.sub(r"\1: ", text), "")
    except (ConfigError, ValueError):
        return None
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else None


@dataclass
class Given:
    """The arguments of a command, and the keys of a scenario that follow from them.

    An argument of a wrong form is a problem, which `check` raises.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)  # text, a list of texts, or whether a flag is set
    positional: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # dotted keys of a scenario
    not_modelled: dict[str, str] = field(
        default_factory=dict
    )  # arguments whose value a run does not follow, with the reason
    assumed: list[str] = field(default_factory=list)  # sentences about what the server does where the command is silent
    release: str | None = None  # which the command names
    has_image: bool = False  # as that of an image
    known_release: str | None = None  # the same, or that of the scenario
    written: Mapping[str, str] = field(default_factory=dict)  # files that the command writes itself, by path
    folder: Path | None = None  # of the file that the command was read from
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that the text sets for the server
    servers: Mapping[str, int] = field(default_factory=dict)  # how many a manifest starts, by pool; "" without pools

    def refuse(self, name: str, message: str) -> None:
        problem = Problem(f"--{name}", message)
        if problem not in self.problems:  # an argument may be read twice
            self.problems.append(problem)

    def check(self) -> None:
        """Raise ConfigError if there is any problem."""
        if self.problems:
            raise ConfigError(self.source, self.problems)

    def text(self, name: str) -> str | None:
        return self.values.get(name)

    def flag(self, name: str) -> bool | None:
        return self.values.get(name)

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """Return one of the known words, in their spelling; case does not matter."""
        text = self.values.get(name)
        if text is None:
            return None
        found = next((word for word in known if word.lower() == str(text).lower()), None)
        if found is None:
            self.refuse(name, f"is {text!r}; expected {', '.join(known[:-1])} or {known[-1]}")
        return found

    def integer(self, name: str, least: int = 1, most: int | None = None) -> int | None:
        """Return a number of at least `least`, up to `most`. It may have a suffix: 32k is 32,000, 32K is 32,768,
        10GiB is 10G, and 10GB is 10g."""
        text = self.values.get(name)
        if text is None:
            return None
        found = re.fullmatch(r"(-?\d{1,15}(?:\.\d{1,9}(?=\w))?)(|[kKmMgGtT]|[KMGT]i?B)", text.strip())
        number = None if found is None else int(Fraction(found[1]) * _SUFFIXES.get(found[2], 1))
        if number is None or number < least or (most is not None and number > most):
            until = "on" if most is None else f"to {most}"
            self.refuse(name, f"is {text!r}; expected an integer from {least} {until}")
            return None
        return number

    def share(self, name: str) -> float | None:
        text = self.values.get(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 < number <= 1:
            self.refuse(name, f"is {text!r}; expected a number above 0, up to 1")
            return None
        return number

    def number(self, name: str, most: float | None = None) -> float | None:
        """Return a finite number from 0 on, up to `most`."""
        text = self.values.get(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf") or (most is not None and number > most):
            self.refuse(name, f"is {text!r}; expected a number from 0 {'on' if most is None else f'to {most:g}'}")
            return None
        return number

    def integers(self, name: str) -> list[int] | None:
        """Return the numbers of a list, which may have commas between them or be a JSON list."""
        words = self.values.get(name)
        if words is None:
            return None
        parts = [part for word in words for part in re.split(r"[,\s]+", word.strip("[]")) if part]
        if not parts or not all(re.fullmatch(r"\d{1,9}", part) and 1 <= int(part) <= MAX_SIZE for part in parts):
            self.refuse(name, f"is {' '.join(words)!r}; expected numbers from 1 to {MAX_SIZE}")
            return None
        return sorted({int(part) for part in parts})

    def integer_or(self, name: str, default: int, where: str = "", least: int = 1) -> int:
        """Return a number, or the server's default, which is noted with `where` it holds."""
        number = self.integer(name, least)
        if number is None:
            self.assumed.append(f"{name} is {default}, its default{where}")
        return default if number is None else number

    def table(self, name: str) -> dict[str, Any]:
        """Return a JSON object; one whose keys were given one by one (--name.key value) is one already."""
        value = self.values.get(name, {})
        if isinstance(value, dict):
            return value
        try:
            found = parse_json(value, refuse_repeated_keys)
        except ParseError as error:
            found = _without_its_quotes(value)
            if found is None:
                self.refuse(name, f"is no JSON: {error}")
                return {}
            note = f"--{name} has lost its quotes to the shell and is read as {json.dumps(found)}"
            if note not in self.assumed:
                self.assumed.append(note)
        if not isinstance(found, dict):
            self.refuse(name, f"is {value!r}; expected a JSON object")
            return {}
        return found

    def options(self, path: str) -> Mapping[Any, Any]:
        """Return the keys of a YAML file that the command names, or writes itself. Raises ConfigError."""
        text = self.written.get(path)
        documents = parse_yaml(read_text(self.place(path)) if text is None else text, path)
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise ConfigError.of(path, "", "has no keys; expected those of the server, such as a model")
        return documents[0]

    def place(self, path: str) -> str:
        """Return where a file lies that the command names: where the program runs, else beside the file with the
        command."""
        beside = self.folder / path if self.folder is not None and not os.path.isfile(path) else None
        return str(beside) if beside is not None and beside.is_file() else path

    # -- what a scenario gets -----------------------------------------------------------------------------------------

    def model(self, name: str) -> str:
        """Take the model from an argument or from the place before all arguments, and return it; empty without one."""
        named, placed = self.text(name), next(iter(self.positional), None)
        if named and placed and named != placed:
            self.refuse(name, f"is {named!r}, and the command also has {placed!r}; expected one model")
        model = named or placed or ""
        if model:
            self.settings["model.target"] = model
        return model

    def refuse_pipeline(self, name: str) -> int:
        """Refuse more than one pipeline stage, because a run of one stage has other times and another KV pool. Return
        their number."""
        if (stages := self.integer(name)) is not None and stages > 1:
            message = (
                f"is {stages}, but pipeline stages have no price here: a run of one stage would have other times and "
                "another KV pool; expected 1, with more tensor parallelism or replicas instead"
            )
            self.refuse(name, message)
        return stages or 1

    def spread(self, name: str, devices: int, per_node: int) -> None:
        """Divide the devices of all engines among the nodes of the argument `name`. `per_node`: those that the GPU's
        fast link connects; in a rack it connects nodes too."""
        nodes = self.integer(name) or 1
        if devices % nodes:
            self.refuse(name, f"is {nodes}, which does not divide the {devices} devices of the command")
        elif nodes > 1 and devices // nodes < per_node == NODE:
            self.settings["hardware.gpus_per_node"] = devices // nodes
        elif nodes > 1 and per_node != NODE:
            self.assumed.append(f"the fast link of a rack connects {per_node} devices, over its nodes")

    def multiply(self) -> None:
        """Set the servers that a manifest starts, each with the engines of one command."""
        if "disaggregation.prefill" not in self.settings:
            servers = sum(self.servers.values())
            if self.servers and not servers:
                self.assumed.append("the manifest has 0 replicas: one server is simulated")
            if servers > 1:
                self.settings["hardware.replicas"] = self.settings.get("hardware.replicas", 1) * servers
                self.assumed.append(f"the text starts {servers} servers (hardware.replicas)")
        elif self.servers.get("prefill") and self.servers.get("decode"):
            pools = {role: self.servers[role] for role in ("prefill", "decode")}
            self.settings |= {f"disaggregation.{role}": number for role, number in pools.items()}
            self.assumed.append(
                f"the text starts {pools['prefill']} servers for prefill and {pools['decode']} for decode"
            )

    def accept(self, reached: Sequence[float]) -> None:
        """Take the acceptance that a server is told to pretend: `reached` has for each draft position the share of
        rounds that accept it and all before it. Rounds are independent."""
        before = [1.0, *reached[:-1]]
        conditional = [share / last if last else 0.0 for share, last in zip(reached, before, strict=True)]
        self.settings |= {
            "acceptance.conditional": [round(share, 6) for share in conditional],
            "acceptance.request_share": 0.0,
            "acceptance.field_share": 0.0,
        }
        mean = 1 + sum(reached)
        self.assumed.append(f"the server pretends its acceptance: {mean:.3g} tokens a round (acceptance.conditional)")

    def disaggregate(self) -> None:
        """Set one engine for prefill and one for decode, because a command starts a single pool."""
        self.settings |= {"disaggregation.prefill": 1, "disaggregation.decode": 1}
        if not (self.servers.get("prefill") and self.servers.get("decode")):
            self.assumed.append(
                "the other pool has one engine as well, of the same kind; give disaggregation.prefill and disaggregation.decode, "
                "and its hardware in hardware.prefill or hardware.decode"
            )
        for name in ("hicache-ratio", "hicache-size", "enable-hierarchical-cache", "kv-offloading-size"):
            if name in self.values:
                self.not_modelled[f"--{name}"] = "host memory behind the prefix cache is not simulated with two pools"
        for key in ("engine.host_cache_gb", "engine.host_cache_ratio"):
            self.settings.pop(key, None)


def reached_by(length: float, steps: int) -> list[float]:
    """Return the share of rounds that reach each of `steps` draft positions, if every round accepts one of the whole
    numbers next to a mean `length`."""
    return [min(max(length - 1 - position, 0.0), 1.0) for position in range(steps)]
