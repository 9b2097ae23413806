"""The suite of the allocator contract."""

from ..suites import Suite
from . import operations as ops
from .contract import AllocatorCapabilities, AllocatorConfig
from .trial import AllocatorTrial
from .vocabulary import draw_config, simpler_configs, small_scope, vocabulary

SUITE = Suite(
    name="allocator",
    config=AllocatorConfig,
    capabilities=AllocatorCapabilities,
    operations=ops.OPERATIONS,
    trial=AllocatorTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=(
        "foretoken.checks.adapters.kv_allocator:make",
        "foretoken.checks.adapters.kv_store:make",
        "foretoken.properties.allocator.plain:make",
    ),
    quick=60_000,
    simpler_configs=simpler_configs,
    small_scope=small_scope,
    probes={"ALLOC-10": (ops.FreeStray, ops.FreeTwice)},
)
