"""The suite of the prefix cache contract."""

from ..harness.suite import Suite
from . import operations as ops
from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .trial import PrefixCacheTrial
from .vocabulary import draw_config, simpler_configs, small_scope, vocabulary

SUITE = Suite(
    name="prefix-cache",
    config=PrefixCacheConfig,
    capabilities=PrefixCacheCapabilities,
    operations=ops.OPERATIONS,
    trial=PrefixCacheTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    quick=40_000,
    simpler_configs=simpler_configs,
    small_scope=small_scope,
    probes={"RADIX-02": (ops.UnlockStray,)},
)
