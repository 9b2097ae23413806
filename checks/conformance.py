"""Checks of executors and transports, whose contracts speak in our own types; those of the other contracts are in
`properties/conformance.py`."""

from ..properties.conformance import for_tests
from .registry import EXECUTOR, MANAGER, TRANSPORT

ExecutorConformance, check_executor = for_tests(EXECUTOR.name)
BlockManagerConformance, check_block_manager = for_tests(MANAGER.name)
TransportConformance, check_transport = for_tests(TRANSPORT.name)
