"""Device times from measured kernels: NVIDIA's database in the package aiconfigurator-core (the extra `measured`,
Apache-2.0).

The package has tables of single kernels, measured on a GPU under a server's build: matrix products, attention, expert
layers, collectives. It composes the passes of a model from them. `database.py` asks it, `tables.py` keeps the answers,
`forward.py` looks them up; the package is imported only to make tables that are not kept yet.
"""

from .database import NotMeasured, packaged_config, packaged_models
from .forward import MeasuredForward
from .tables import KernelTables, measured_tables

__all__ = ["KernelTables", "MeasuredForward", "NotMeasured", "measured_tables", "packaged_config", "packaged_models"]
