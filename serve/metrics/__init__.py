"""The metrics of a server, for Prometheus, under its own names and those of other servers."""

from .counts import ServerMetrics
from .exposition import Exposition
from .series import STYLES

__all__ = ["STYLES", "Exposition", "ServerMetrics"]
