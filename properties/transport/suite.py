"""The suite of the transport contract."""

from ..suites import Suite
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
    subjects=("foretoken.properties.adapters.handoff:make",),
    quick=12_000,
    simpler_configs=simpler_configs,
    probes={"HANDOFF-10": (ops.ChangeRole,)},
    run_length=120,
)
