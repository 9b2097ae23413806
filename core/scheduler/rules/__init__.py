"""The rules of servers. An engine follows one of them whole; docs/servers.md compares them.

`server_rules.py` says what an engine asks its rules, and has the answers that most servers give. Each server has a file
with its own answers. `admission_state.py` keeps what changes while an engine follows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ...errors import ConfigError, Problem, nearest
from .ours import OurRules
from .server_rules import ServerRules
from .sglang import SGLangRules
from .vllm import VLLMRules

__all__ = [
    "FORMER_RULES",
    "RULES",
    "SETTINGS",
    "OurRules",
    "SGLangRules",
    "ServerRules",
    "VLLMRules",
    "rules_from_json",
    "rules_to_json",
    "settings_of",
    "with_settings",
]

RULES: dict[str, type[ServerRules]] = {rules.name: rules for rules in (OurRules, SGLangRules, VLLMRules)}
"""The rules by their names in logs."""

SETTINGS: tuple[str, ...] = tuple(dict.fromkeys(field.name for rules in RULES.values() for field in fields(rules)))
"""What servers let a user set about their rules. Each setting is a key of a scenario's table `engine`."""

FORMER_RULES = (
    *("guarantee_fixed", "retract_first", "retracted_to", "cache_retracted", "pause_until", "retry_after"),
    *("admit_with", "row_slots", "released_at", "late_tokens", "sure_ends", "short_chunk", "cached_at", "lone_token"),
)
"""Rules that scenarios and logs could name one by one; `hardware.server` and `rules` name them as a whole."""


def settings_of(rules: ServerRules) -> dict[str, Any]:
    """Return the settings of these rules with their values."""
    return {field.name: getattr(rules, field.name) for field in fields(rules)}


def with_settings(rules: ServerRules, given: Mapping[str, Any]) -> ServerRules:
    """Return the rules with the given settings: those that they have, and that are not None."""
    return replace(rules, **{key: given[key] for key in settings_of(rules) if given.get(key) is not None})


def rules_to_json(rules: ServerRules) -> dict[str, Any]:
    """Return name and settings as JSON values. The name `OurRules.name` is left out, and so are most settings that have
    their default."""
    name = {} if isinstance(rules, OurRules) else {"rules": rules.name}
    values = {field.name: (getattr(rules, field.name), field.default) for field in fields(rules)}
    named = ("watermark", "guarantee_output")
    return name | {key: value for key, (value, usual) in values.items() if key in named or value != usual}


def rules_from_json(values: Mapping[str, Any], source: str, key: str) -> ServerRules:
    """Read the rules from the description of an engine, whose place in `source` is `key`.

    Raises ConfigError for an unknown name, an unknown setting of the rules, and for rules that are named one by one.
    """
    if old := [name for name in FORMER_RULES if name in values]:
        message = "is a rule by itself, which only older versions write: make the file again with this version"
        raise ConfigError(source, [Problem(f"{key}.{name}", message) for name in old])
    name = values.get("rules", OurRules.name)
    if name not in RULES:
        raise ConfigError.of(
            source, f"{key}.rules", f"{name!r} is none of {', '.join(RULES)}{nearest(str(name), RULES)}"
        )
    kind = RULES[name]
    known = {field.name for field in fields(kind)}
    if foreign := [name for name in SETTINGS if name in values and name not in known]:
        raise ConfigError(
            source, [Problem(f"{key}.{one}", f"is no setting of the rules {kind.name}") for one in foreign]
        )
    return kind(**{name: values[name] for name in known if name in values})
