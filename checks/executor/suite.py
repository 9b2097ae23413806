"""The suite of the executor contract."""

from ...properties.harness.suite import Suite
from .trial import ExecutorTrial

SUITE = Suite.of(
    ExecutorTrial,
    subjects=(
        "foretoken.checks.executor.reference_subject:make",
        "foretoken.checks.executor.simulated_subject:make",
        "foretoken.checks.executor.torch_subject:make",
    ),
)
