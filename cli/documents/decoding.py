"""What the commands that decode print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...observe.output_files import Document


@dataclass(frozen=True)
class BenchDocument(Document):
    """Timings of decoding.

    Attributes:
        complete: Whether every cell is finished.
        command: The arguments of the command.
        versions: Of Python and the libraries that matter.
        machine: The device, and the bandwidth of its memory; null if nothing is finished.
        parameters: The options, resolved.
        cells: A result per batch size, context and number of steps.
        graphs: What captured CUDA graphs cost; null if none was captured.
    """

    FORMAT: ClassVar[str] = "foredraft-bench"

    complete: bool
    command: Sequence[str]
    versions: Mapping[str, str]
    machine: Mapping[str, Any] | None
    parameters: Mapping[str, Any]
    cells: Sequence[Mapping[str, Any]]
    graphs: Mapping[str, Any] | None


@dataclass(frozen=True)
class EstimateDocument(Document):
    """What rounds should take on a GPU that is not here.

    Attributes:
        parameters: The options, resolved.
        estimates: A round per batch size, context and number of steps, with its parts.
        interval: The 80 % interval of these times, as factors on them [low, high].
        intervals_rest_on: The published points behind the interval.
    """

    FORMAT: ClassVar[str] = "foredraft-bench-estimate"

    parameters: Mapping[str, Any]
    estimates: Sequence[Mapping[str, Any]]
    interval: tuple[float, float]
    intervals_rest_on: str


@dataclass(frozen=True)
class TwinDocument(Document):
    """The real executor beside its simulation.

    Attributes:
        complete: Whether every comparison is finished.
        device: What was measured.
        clock: "wall" or "cpu".
        comparisons: Predicted and measured numbers per way to decode and load.
    """

    FORMAT: ClassVar[str] = "foredraft-twin"

    complete: bool
    device: str
    clock: str
    comparisons: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TinyDocument(Document):
    """A small target and its drafts.

    Attributes:
        directory: Where they are.
        reused: Whether they were there already.
        pair: The content of pair.json.
    """

    FORMAT: ClassVar[str] = "foredraft-tiny"

    directory: str
    reused: bool
    pair: Mapping[str, Any]


@dataclass(frozen=True)
class WarmDocument(Document):
    """What was done for later sessions.

    Attributes:
        device: The device.
        compiled: Whether kernels were compiled; false on a CPU.
        graphs: CUDA graphs that fit into memory.
        graph_sizes: Batch sizes for which a GPU captures graphs; empty where they were captured.
    """

    FORMAT: ClassVar[str] = "foredraft-warm"

    device: str
    compiled: bool
    graphs: int
    graph_sizes: Sequence[int]


@dataclass(frozen=True)
class SelftestDocument(Document):
    """A test of decoding on this machine.

    Attributes:
        ok: Whether no step failed.
        directory: Where the report is.
        report: The content of selftest.json.
    """

    FORMAT: ClassVar[str] = "foredraft-selftest"

    ok: bool
    directory: str
    report: Mapping[str, Any]


@dataclass(frozen=True)
class GenerateDocument(Document):
    """One output of `generate`, which prints a line for each.

    Attributes:
        id: Of the prompt.
        text: The output.
        finish: Why it ended.
        tokens: Its tokens.
        logprobs: Their log-probabilities; null without --logprobs.
        message: What went wrong, or why the output ends early; empty otherwise.
    """

    FORMAT: ClassVar[str] = "foredraft-generate"

    id: str
    text: str
    finish: str
    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    message: str
