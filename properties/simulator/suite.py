"""The suite of the simulator contract."""

from ..harness.suite import Suite
from . import operations as ops
from .contract import SimulatorCapabilities, SimulatorConfig
from .trial import SimulatorTrial
from .vocabulary import draw_config, simpler_configs, vocabulary

SUITE = Suite(
    name="simulator",
    config=SimulatorConfig,
    capabilities=SimulatorCapabilities,
    operations=ops.OPERATIONS,
    trial=SimulatorTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=("foretoken.checks.adapters.simulator:make",),
    quick=400,
    simpler_configs=simpler_configs,
    probes={"SIM-11": (ops.Impossible,)},
    run_length=10,
    limit_s=60.0,
)
