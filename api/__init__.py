"""Foredraft: simulate, run and check the serving of language models with speculative decoding.

    from foredraft import simulate

    result = simulate("chat.toml", {"workload.rate": 20.0})
    print(result.summary["p99_ttft_ms"], result.slo_attainment)

The names here are what most users need. Importing the package loads none of the others; `simulate`, `Scenario` and
`Result` need the extra `sim`, `Session` the extra `gpu`, and `check` NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.properties.harness.report import Report
    from foredraft.session import Session
    from foredraft.sim.scenario import Scenario
    from foredraft.simulation import Result

    __version__: str

__all__ = ["Result", "Scenario", "Session", "__version__", "check", "simulate"]


def simulate(
    scenario: Scenario | Mapping[str, Any] | str | PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Simulate a deployment and return its `Result`.

    Args:
        scenario: A `Scenario`, a scenario file, its tables as a dictionary, or None for the defaults (Llama-3.1-8B on
            one H100, EAGLE-3).
        overrides: Dotted keys with their values, which replace those of the scenario.

    Raises:
        ForedraftError: The scenario cannot run; the message names every key at fault.

    Example::

        for gpu in ("H100", "H200"):
            result = simulate("examples/chat_on_h100.toml", {"hardware.gpu": gpu})
            print(gpu, result.summary["p99_ttft_ms"], result.slo_attainment)
    """
    from foredraft.simulation import run_scenario

    return run_scenario(scenario, overrides or {})


def check(contract: str, make: Callable[[Any], Any] | str, **options: Any) -> Report:
    """Search for operations that break a component, and return the report; nothing is raised for a broken invariant.

    Args:
        contract: "allocator", "prefix-cache", "relay", "accept", "acceptance-process", "step-controller", "engine",
            "executor", "block-manager", "transport" or "simulator".
        make: A function that takes a configuration and returns a fresh component, or its name as "module:make".
        **options: Passed to `foredraft.properties.conformance.check`, for example `budget="60s"`,
            `capabilities=("paged",)`, `seed=7`.

    Raises:
        ConfigError: There is no such contract, component or capability.

    Example::

        report = check("allocator", lambda config: MyAllocator(config.num_pages), budget="10s")
        assert report.ok, report.text()
    """
    from foredraft.checks import registry
    from foredraft.properties import conformance
    from foredraft.properties.harness import importing

    return conformance.check(
        registry.suite_of(contract), importing.load_make(make) if isinstance(make, str) else make, **options
    )


def __getattr__(name: str) -> Any:
    if name == "Scenario":
        from foredraft.sim.scenario import Scenario

        return Scenario
    if name == "Session":
        from foredraft.session import Session

        return Session
    if name == "Result":
        from foredraft.simulation import Result

        return Result
    if name == "__version__":
        from importlib.metadata import version

        return version("foredraft")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
