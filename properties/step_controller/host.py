"""Builds the graphs that a controller asks for; it remembers them, and fails when told to."""

from __future__ import annotations


class BuildFailed(RuntimeError):
    """A graph could not be captured."""


class RecordingBuilder:
    """`built` maps (steps, draft tokens, batch size) to the graph that was built last."""

    def __init__(self) -> None:
        self.built: dict[tuple[int, int, int], str] = {}
        self.builds_to_failure = 0  # 0: none fails
        self.num_builds = 0

    def __call__(self, steps: int, num_draft_tokens: int, batch_size: int) -> str:
        self.num_builds += 1
        if self.builds_to_failure:
            self.builds_to_failure -= 1
            if not self.builds_to_failure:
                raise BuildFailed(f"the graph of {steps} steps for {batch_size} rows does not fit")
        graph = f"graph {self.num_builds}: {steps} steps, {num_draft_tokens} draft tokens, {batch_size} rows"
        self.built[steps, num_draft_tokens, batch_size] = graph
        return graph
