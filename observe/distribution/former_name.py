"""Recognises files and settings of version 0.1, when this project was called foretoken. Commands refuse them with a
remedy and never read them.

A package called foretoken that is installed today is another project. Nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import ConfigError, Problem

FORMER_NAME, NAME = "foretoken", "foredraft"
FORMER_MODULES = tuple(f"{FORMER_NAME}.{package}." for package in ("checks", "core", "gpu", "properties", "sim"))
VARIABLES = ("API_KEY", "CACHE", "KERNELS")
"""The environment variables that users set, without their prefix. For example, FORETOKEN_CACHE of 0.1 is
FOREDRAFT_CACHE today."""
MOVED_COMPONENTS = {
    "foredraft.checks.executor.reference_subject": "foredraft.properties.executor.reference.adapter",
    "foredraft.checks.executor.simulated_subject": "foredraft.checks.adapters.simulated_executor",
    "foredraft.checks.executor.torch_subject": "foredraft.checks.adapters.torch_executor",
    "foredraft.checks.manager.plain": "foredraft.properties.block_manager.plain",
    "foredraft.checks.transport.handoff_subject": "foredraft.checks.adapters.handoff",
    "foredraft.checks.adapters.transformers_blocks": "foredraft.checks.servers.transformers_blocks",
    "foredraft.checks.adapters.transformers_scheduler": "foredraft.checks.servers.transformers_scheduler",
}
"""Former module -> module, of the components that stored cases and installed entry points name."""
RENAMED_ADAPTERS = {"plain-manager": "plain-block-manager"}
"""Former name -> name of an adapter."""


def made_by_former(remedy: str) -> str:
    """Return the message for a file of version 0.1; it ends with the remedy."""
    return f"made by version 0.1, then called {FORMER_NAME}, which this version does not read: {remedy}"


def is_former_form(form: object) -> bool:
    """Return whether a file that names its format, such as "foretoken-profile", is one of 0.1."""
    return isinstance(form, str) and form.startswith(FORMER_NAME)


def is_former_version(version: object) -> bool:
    """Return whether the version that a file names, such as that of summary.json, is one of 0.1."""
    return isinstance(version, str) and version.startswith("0.1.")


def renamed(name: str) -> str:
    """Return the message for a setting whose value was the former name."""
    return f"{name!r} is called {NAME!r} since version 0.2"


def is_former_module(name: str) -> bool:
    """Return whether `name` is that of a module of 0.1, such as foretoken.checks.adapters.kv_allocator."""
    return name.startswith(FORMER_MODULES)


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for each variable that is set under its former name alone."""
    prefixes = [f"{name.upper()}_" for name in (FORMER_NAME, NAME)]
    names = [tuple(prefix + variable for prefix in prefixes) for variable in VARIABLES]
    problems = [
        Problem(former, f"is called {now} since version 0.2; set that, or unset {former}")
        for former, now in names
        if former in environment and now not in environment
    ]
    if problems:
        raise ConfigError("environment", problems)
