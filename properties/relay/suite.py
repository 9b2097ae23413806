"""The suite of the relay contract."""

from ..harness.suite import Suite
from . import operations as ops
from .contract import RelayCapabilities, RelayConfig
from .trial import RelayTrial
from .vocabulary import draw_config, simpler_configs, vocabulary

SUITE = Suite(
    name="relay",
    config=RelayConfig,
    capabilities=RelayCapabilities,
    operations=ops.OPERATIONS,
    trial=RelayTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=(
        "foretoken.checks.adapters.future_map:make",
        "foretoken.checks.adapters.future_map:make_poisoned",
    ),
    quick=40_000,
    simpler_configs=simpler_configs,
    probes={"RELAY-03": (ops.ReadAs, ops.HalfAs, ops.Inherit, ops.Stray)},
)
