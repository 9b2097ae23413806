"""The owner of the live fields that a controller's runtime states are made of; it remembers what was built, and fails when told to."""

from __future__ import annotations

from collections.abc import Mapping

HALVES = 2


class BuildFailed(RuntimeError):
    """A graph could not be captured, or its fields not be set."""


class RecordingHost:
    """Three live fields. `built` maps (steps, draft tokens) to the batch sizes with graphs, None without graphs."""

    def __init__(self) -> None:
        self.fields: dict[str, object] = {"graph": "none", "buffers": 0, "metadata": 0}
        self.built: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.states: dict[int, dict[str, object]] = {}
        self.builds_to_failure = 0  # 0: none fails
        self.fail_install = False

    def build_runtime_state(
        self, steps: int, num_draft_tokens: int, cuda_graph_bs: tuple[int, ...] | None
    ) -> Mapping[str, object]:
        # What is being built is live for a moment, as it is while a graph is captured.
        self.fields = {"graph": f"capturing {steps}", "buffers": -1, "metadata": -1}
        if self.builds_to_failure:
            self.builds_to_failure -= 1
            if not self.builds_to_failure:
                raise BuildFailed(f"the graphs for {steps} steps do not fit")
        self.built[steps, num_draft_tokens] = None if cuda_graph_bs is None else tuple(cuda_graph_bs)
        state = {"graph": f"{steps} steps", "buffers": num_draft_tokens, "metadata": 1000 * steps}
        self.states[steps] = dict(state)
        return state

    def runtime_fields(self) -> Mapping[str, object]:
        return dict(self.fields)

    def install_runtime_fields(self, fields: Mapping[str, object]) -> None:
        if self.fail_install:
            self.fail_install = False
            self.fields.update(list(fields.items())[:HALVES])
            raise BuildFailed("the fields are half set")
        self.fields.update(fields)
