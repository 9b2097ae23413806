"""From a scenario to the parts of a run.

`deployment.py` resolves what the engines run on and which server they are like, `models.py` the target and its draft,
`acceptance.py` the acceptance process; `assembly.py` makes the engines' specification, the costs and the memory plan
from them. `rounds.py` says what a decode round of them takes, `confidence.py` how sure a run's results are,
`explaining.py` what `--explain` and reports say of them.
"""

from .assembly import Assembly, assemble

__all__ = ["Assembly", "assemble"]
