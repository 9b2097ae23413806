"""The suite of the step-controller contract."""

from ..harness.suite import Suite
from . import operations as ops
from .contract import StepsCapabilities, StepsConfig
from .trial import StepControllerTrial
from .vocabulary import draw_config, simpler_configs, vary, vocabulary

SUITE = Suite(
    name="step-controller",
    config=StepsConfig,
    capabilities=StepsCapabilities,
    operations=ops.OPERATIONS,
    trial=StepControllerTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=(
        "foretoken.checks.adapters.step_controller:make_fixed",
        "foretoken.checks.adapters.step_controller:make_ema",
        "foretoken.checks.adapters.step_controller:make_goodput",
    ),
    quick=12_000,
    simpler_configs=simpler_configs,
    twin_config=vary,
    probes={"STEPS-02": (ops.Garbage,), "STEPS-09": (ops.ReloadBroken,)},
    limit_s=10.0,
)
