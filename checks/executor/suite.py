"""The suite of the executor contract."""

from ...properties.harness.suite import Suite
from . import invariants as invariants  # registers the checkers
from . import operations as ops
from .contract import ExecutorCapabilities, ExecutorConfig
from .trial import ExecutorTrial
from .vocabulary import draw_config, simpler_configs, vocabulary

SUITE = Suite(
    name="executor",
    config=ExecutorConfig,
    capabilities=ExecutorCapabilities,
    operations=ops.OPERATIONS,
    trial=ExecutorTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=(
        "foretoken.checks.executor.reference_subject:make",
        "foretoken.checks.executor.simulated_subject:make",
        "foretoken.checks.executor.torch_subject:make",
    ),
    quick=6_000,
    simpler_configs=simpler_configs,
    probes={"ACCEPT-17": (ops.Merge, ops.Arrive)},
    run_length=120,
    limit_s=60.0,
)
