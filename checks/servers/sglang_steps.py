"""SGLang's adaptive number of draft steps behind the contract of step controllers.

It does not learn with how many steps a round ran, so a late result of another number moves the average, too. It tries
draft steps again at each look after 0 steps, and never more rarely. Its caller checks the results.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...properties.harness.contract import Adapter
from ...properties.step_controller.contract import StepControllerConfig
from ...properties.step_controller.rule import read_table
from .release import Recorded
from .sglang import module_of

_folder: list[tempfile.TemporaryDirectory[str]] = []
_files: dict[str, Path] = {}


def _file(text: str) -> Path:
    """Return a file with this text, for a constructor that reads its table from a file."""
    if not _folder:
        _folder.append(tempfile.TemporaryDirectory(prefix="foredraft-"))
        atexit.register(_folder[0].cleanup)
    if text not in _files:
        _files[text] = Path(_folder[0].name) / f"table-{len(_files)}.json"
        _files[text].write_text(text, encoding="utf-8")
    return _files[text]


class SGLangSteps:
    """The policy of the release, which its controller asks for the steps of each batch."""

    def __init__(self, config: StepControllerConfig) -> None:
        module, path = module_of("speculative.adaptive_spec_params"), str(_file(config.table))
        union = module.resolve_candidate_steps_from_config(path)
        initial = config.initial if config.initial >= 0 else union[len(union) // 2]
        self.own_calls: list[str] | None = None
        self.made: str = f"params = AdaptiveSpeculativeParams({initial}, cfg_path)  # a file with {config.table}"
        self.policy: Any = module.AdaptiveSpeculativeParams(initial, path)
        if config.captured:
            self.made += f"\nparams.set_cuda_graph_bs({list(config.captured)})"
            self.policy.set_cuda_graph_bs(list(config.captured))
        self.params: Any = Recorded(self.policy, "params", self)

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        return int(self.params.get_steps_for_batch(batch_size))

    def observe(self, correct_drafts: Sequence[float], batch_size: int, executed_steps: int) -> None:
        self.params.on_verify_complete(list(correct_drafts), batch_size)

    def state(self) -> dict[str, object]:
        return {
            str(bound): [slot.current_steps, slot.ema_accept_len, slot._batch_count]
            for bound, slot in self.policy._slots.items()
        }

    def average(self, batch_size: int) -> float:
        return float(self.policy._route(batch_size).ema_accept_len)


make: Adapter = Adapter(
    SGLangSteps,
    ("adaptive", "inspection", "averages", "average_rule", "settles", "untold_steps"),
    lambda config: read_table(config.table).min_dwell_batches == 0,
)
