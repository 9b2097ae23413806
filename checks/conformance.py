"""Checks of executors and transports, whose contracts speak in our own types; those of the other contracts are in
`properties/conformance.py`."""

from ..properties.conformance import Conformance, checker
from .registry import EXECUTOR, MANAGER, TRANSPORT


class ExecutorConformance(Conformance):
    contract = EXECUTOR.name


class BlockManagerConformance(Conformance):
    contract = MANAGER.name


class TransportConformance(Conformance):
    contract = TRANSPORT.name


check_executor = checker(EXECUTOR.name)
check_block_manager = checker(MANAGER.name)
check_transport = checker(TRANSPORT.name)
