"""Reads and writes the arguments of servers as the keys of a scenario declare them (`sim/scenario/flags.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.errors import Problem
from ...observe.input_files import read_toml
from ...sim.cost.hardware import GPU
from ...sim.scenario import Scenario
from ...sim.scenario.flags import NOTHING, WORD, Flags, Usage
from ...sim.scenario.table import declared_keys
from .command import FLAG, LIST, VALUE, Given, KnownArgument

Reader = Callable[[Given, GPU], None]
"""Sets keys that follow from several arguments, or from a default; takes what is given and the GPU."""


class Form(NamedTuple):
    """How a value is read from an argument (None if it has a problem, which `Given` notes), and how it is written."""

    read: Callable[[Given, str], Any]
    write: Callable[[Any], Any] = lambda value: value


def _gigabytes(given: Given, name: str) -> float | None:
    size = given.integer(name)
    return None if size is None else size / 1e9


FORMS = {
    "integer": Form(Given.integer),
    "integers": Form(Given.integers),
    "number": Form(Given.number),
    "share": Form(Given.share),  # above 0, up to 1
    "fraction": Form(lambda given, name: given.number(name, most=1.0)),
    "bytes": Form(_gigabytes, lambda gigabytes: round(gigabytes * 1e9)),
}


@cache
def flags_of(server: str) -> list[tuple[str, Flags]]:
    """Return the arguments of a server ("sglang", "vllm", "trtllm") with the dotted key that names them, in the order
    of the keys."""
    leaves = [(key, one) for key, declared in declared_keys(Scenario) for one in declared[-1]]
    return [(key, one) for key, one in leaves if isinstance(one, Flags) and one.server == server]


def usages_of(server: str) -> list[Usage]:
    """Return all arguments of a server that keys of a scenario name."""
    return [usage for _, flags in flags_of(server) for usage in flags.usages]


def known_arguments(server: str) -> dict[str, KnownArgument]:
    """Return the arguments of a server: those of its file beside this one, and those that keys of a scenario name."""
    data = read_toml(Path(__file__).with_name(f"{server}.toml"))
    known: dict[str, KnownArgument] = {}
    for reason, group in [
        (None, data["without_effect"]),
        *((group["reason"], group) for group in data["not_modelled"]),
    ]:
        for kind in (FLAG, VALUE, LIST):
            known |= dict.fromkeys(group.get(kind, "").split(), KnownArgument(kind, reason))
    kinds = {"": FLAG, "N": VALUE, "N...": LIST}
    return known | {usage.name: KnownArgument(kinds[usage.value], "") for usage in usages_of(server)}


def known_values(server: str) -> dict[str, list[str]]:
    """Return the values that arguments of a server take, by argument; of arguments without a list all do."""
    data = read_toml(Path(__file__).with_name(f"{server}.toml"))
    return {name: words.split() for name, words in data.get("values_taken", {}).items()}


def other_names(server: str) -> dict[str, str]:
    """Return the name of an argument by its other spellings."""
    data = read_toml(Path(__file__).with_name(f"{server}.toml"))
    listed: dict[str, str] = data.get("other_names", {})
    return listed | {other: one.name for one in usages_of(server) for other in one.other_names}


@cache
def _reasons_of_keys(server: str, name: str) -> dict[str, str | None]:
    """Return why keys of the object that an argument takes are not modelled, "*" for all that are not listed; None for
    a key without effect."""
    data = read_toml(Path(__file__).with_name(f"{server}.toml"))["keys_of_objects"]
    groups = [group for group in data if group["argument"] == name]
    return {key: group.get("reason") for group in groups for key in group["keys"].split()}


# -- reading ----------------------------------------------------------------------------------------------------------


def read_keys(given: Given, server: str, gpu: GPU, readers: Sequence[Reader]) -> None:
    """Set the keys that are read as declared, then let `readers` set the others, in order."""
    taken = set()
    for key, flags in flags_of(server):
        if not flags.by and key not in taken and _take(given, key, flags):
            taken.add(key)
    for read in readers:
        read(given, gpu)


def _take(given: Given, key: str, flags: Flags) -> bool:
    """Set a key to what the first of its arguments says, else to its usual value. Returns whether one was given, also
    if it has a problem or is not modelled."""
    for usage in flags.usages:
        value = _value_of(given, flags, usage)
        if value is not NOTHING:
            if value is not None:
                given.settings[key] = value
            return True
    if flags.usual is not NOTHING:
        given.settings[key] = flags.usual
    return False


def _value_of(given: Given, flags: Flags, usage: Usage) -> Any:
    """Return the value that an argument says; NOTHING if it says none, None if it has a problem or is not modelled."""
    if not usage.path:
        return _read(given, flags, usage.name, f"--{usage.name}")
    found = given.table(usage.name).get(usage.path)
    within = Given(
        given.source, {} if found is None else {usage.path: found if isinstance(found, bool) else str(found)}
    )
    place = f"{usage.name.replace('-', '_')}.{usage.path}"
    value = _read(within, flags, usage.path, place)
    given.problems += [Problem(place, one.message) for one in within.problems]
    given.not_modelled |= within.not_modelled
    return value


def _read(given: Given, flags: Flags, name: str, place: str) -> Any:
    text = given.values.get(name)
    if text is None:
        return NOTHING
    words = {str(word).lower(): value for word, value in flags.words.items()}
    if str(text).lower() in words:
        value = words[str(text).lower()]
        return NOTHING if value is None else value
    if flags.form != WORD:
        return FORMS[flags.form].read(given, name)
    if flags.otherwise:
        given.not_modelled[place] = flags.otherwise.format(text)
    elif not any(isinstance(word, bool) for word in flags.words):
        given.choice(name, [*flags.words])
    elif not isinstance(text, bool):
        given.refuse(name, f"is {text!r}; expected true or false")
    else:
        return NOTHING  # a switch in its usual state
    return None


def note_keys(given: Given, server: str, name: str, table: Mapping[Any, Any], place: str) -> None:
    """Note the keys of an argument's object from which no key of a scenario follows, each with the reason. `place`:
    what stands before the key."""
    reasons = _reasons_of_keys(server, name)
    declared = {usage.path for usage in usages_of(server) if usage.name == name}
    for key in sorted(set(map(str, table)) - declared):
        reason = reasons.get(key, reasons["*"])
        if reason is not None:
            given.not_modelled[f"{place}{key}"] = reason


# -- writing ----------------------------------------------------------------------------------------------------------


def values_to_write(
    scenario: Scenario, server: str, *places: str, computed: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of arguments that keys of a scenario are written to, by name without dashes
    (kv-cache-config.dtype), and a note on each value that the server has no word for.

    places: The keys that are written as declared, or their tables.
    computed: By key, values of arguments that follow from the whole run; None leaves an argument out.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, flags in flags_of(server):
        name = str(flags.usages[0])
        if key in computed:
            found |= {} if computed[key] is None else {name: computed[key]}
            continue
        if not flags.writes or not any(f"{key}.".startswith(f"{place}.") for place in places):
            continue
        value = attrgetter(key)(scenario)
        if value is None:
            value = None if flags.usual is NOTHING else flags.usual
        word = next((word for word, mine in flags.words.items() if mine == value), NOTHING)
        if value is None:
            continue
        if word is not NOTHING:
            found[name] = word
        elif flags.form != WORD:
            found[name] = FORMS[flags.form].write(value)
        elif value != flags.usual and not isinstance(value, bool):
            notes.append(f"{key} is {value}, for which the server has no argument")
    return found, notes


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command for values of arguments: True and False are switches, a list has several words."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return words
