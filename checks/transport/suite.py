"""The suite of the transport contract."""

from ...properties.harness.suite import Suite
from . import invariants as invariants  # registers the checkers
from . import operations as ops
from .contract import TransportCapabilities, TransportConfig
from .trial import TransportTrial
from .vocabulary import draw_config, simpler_configs, vocabulary

SUITE = Suite(
    name="transport",
    config=TransportConfig,
    capabilities=TransportCapabilities,
    operations=ops.OPERATIONS,
    trial=TransportTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=("foretoken.checks.transport.handoff_subject:make",),
    quick=12_000,
    simpler_configs=simpler_configs,
    probes={"HANDOFF-10": (ops.ChangeRole,)},
    run_length=120,
)
