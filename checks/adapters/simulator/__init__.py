"""Our simulator behind the simulator contract: `foredraft check simulator foredraft.checks.adapters.simulator:make`."""

from .books import machine_of as machine_of
from .service import CheckedSimulator as CheckedSimulator
from .service import make as make
