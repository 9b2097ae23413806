"""The suite of the acceptance contract."""

from ..harness.suite import Suite
from . import operations as ops
from .contract import AcceptCapabilities, AcceptConfig
from .trial import AcceptTrial
from .vocabulary import draw_config, simpler_configs, twin_config, vocabulary

SUITE = Suite(
    name="accept",
    config=AcceptConfig,
    capabilities=AcceptCapabilities,
    operations=ops.OPERATIONS,
    trial=AcceptTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=(
        "foretoken.checks.adapters.tree_accept:make",
        "foretoken.properties.accept.plain:make",
        "foretoken.checks.adapters.torch_accept:make",
    ),
    quick=6_000,
    simpler_configs=simpler_configs,
    twin_config=twin_config,
    run_length=60,
    limit_s=10.0,
)
