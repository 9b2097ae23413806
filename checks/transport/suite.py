"""The suite of the transport contract."""

from ...properties.harness.suite import Suite
from .trial import TransportTrial

SUITE = Suite.of(TransportTrial, subjects=("foretoken.checks.transport.handoff_subject:make",))
