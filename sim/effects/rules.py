"""When a run does not use a key of the table `engine`: rules, each with its keys and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.scheduler.rules import SETTINGS, settings_of
from ..assembly import Assembly
from ..load import contents_are_known

Reason = Callable[[Assembly], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """When `keys` have no effect: `reason` returns why, or None if they have one. A key that ends with a dot means the
    whole table.

    `agreeing` are values that describe what the run does anyway, so they are no mistake. With `tells_agreement` such a
    value of the command line is told, because who gives it expects a difference (`given_keys.said_anyway`). `outcome`
    is the message's text about the key.
    """

    keys: tuple[str, ...]
    reason: Reason
    agreeing: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "has no effect"
    tells_agreement: bool = False

    def agrees(self, key: str, value: Any) -> bool:
        """Return whether the run does what this value says even without it."""
        return key in self.agreeing and self.agreeing[key] == value

    def concerns(self, key: str, value: Any) -> bool:
        if self.agrees(key, value):
            return False
        return any(key.startswith(mine) if mine.endswith(".") else key == mine for mine in self.keys)


def _keys(table: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{table}.{name}" for name in names)


def _when(condition: Callable[[Assembly], bool], reason: str) -> Reason:
    return lambda run: reason.format(run=run, scenario=run.scenario) if condition(run) else None


def _content_is_unknown(run: Assembly) -> str | None:
    if run.clients_are_outside or contents_are_known(run.scenario):
        return None
    return (
        "what the prompts contain is unknown (no workload.prefixes, no hash_ids in the trace), so none is found again"
    )


def _priorities_are_equal(run: Assembly) -> str | None:
    table = run.scenario.workload
    if run.clients_are_outside or (table.trace is None and 0 < table.urgent_share < 1):
        return None
    return "all requests have the same priority (workload.urgent_share)"


def _eviction_is_unused(run: Assembly) -> str | None:
    return _content_is_unknown(run) if run.scenario.engine.prefix_cache else "engine.prefix_cache is false"


def _setting(run: Assembly, name: str) -> Any:
    return settings_of(run.spec.config.rules).get(name)


def _rules_lack(setting: str) -> Reason:
    def reason(run: Assembly) -> str | None:
        if setting in settings_of(run.spec.config.rules):
            return None
        return f"the rules of hardware.server = {run.deployment.server.name} have no such setting"

    return reason


def mode_fell_back(run: Assembly) -> str | None:
    """Return why the run has another mode than the scenario asks for; None if it has that mode."""
    config, asked = run.spec.config, run.scenario.engine.mode or run.deployment.server.mode
    return None if config.mode == asked else config.mode_reason


RULES: tuple[Rule, ...] = (
    Rule(("engine.mode",), mode_fell_back),
    Rule(("engine.prefix_cache",), _content_is_unknown, {"engine.prefix_cache": False}, tells_agreement=True),
    *(Rule((f"engine.{setting}",), _rules_lack(setting)) for setting in SETTINGS if setting != "watermark"),
    Rule(("engine.eviction_policy",), _eviction_is_unused),
    Rule(
        ("engine.watermark",),
        _when(
            lambda run: bool(run.spec.config.rules.guarantee_output),
            "outputs are guaranteed instead (engine.guarantee_output is {run.spec.config.rules.guarantee_output:g})",
        ),
    ),
    Rule(
        _keys("engine", "guarantee_floor", "guarantee_rounds", "guarantee_limit"),
        _when(
            lambda run: not run.spec.config.rules.guarantee_output,
            "no output is guaranteed (engine.guarantee_output is 0)",
        ),
    ),
    Rule(
        ("engine.guarantee_rounds",),
        _when(
            lambda run: _setting(run, "guarantee_floor") == 1, "the share does not fall (engine.guarantee_floor is 1)"
        ),
    ),
    Rule(
        ("engine.batch_wait_rounds",),
        _when(lambda run: not _setting(run, "batch_wait_tokens"), "engine.batch_wait_tokens is 0"),
        {"engine.batch_wait_rounds": 0},
    ),
    Rule(
        ("engine.batch_wait_tokens",),
        _when(lambda run: not _setting(run, "batch_wait_rounds"), "engine.batch_wait_rounds is 0"),
        {"engine.batch_wait_tokens": 0.0},
    ),
    Rule(("engine.preempt", "engine.ageing_bound"), _priorities_are_equal, {"engine.preempt": False}),
)
