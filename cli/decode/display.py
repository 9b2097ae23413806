"""The output of commands that decode: streamed text or lines of JSON, progress, statistics, what was compiled ahead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ...core.errors import count_of
from ..options import print_document
from ..progress import LINE_EVERY_S, StatusLine
from .record import output_line

if TYPE_CHECKING:
    from ...gpu.session.plan import SessionPlan
    from ...gpu.session.text_session import Output, SessionStats, TextDelta

REDRAW_EVERY_S = 0.1
BUSY_SHARE = 0.8
"""A process that computes for less of its time than this waited for a core, not for its own work."""


class Display:
    """Shows outputs on standard output: streamed text, or JSON lines in the order of the requests."""

    def __init__(self, order: list[str], *, as_json: bool, quiet: bool) -> None:
        self._order = order
        self._as_json = as_json
        self._progress = None if quiet or not as_json else DecodeProgress(len(order))
        self._parts: dict[str, list[TextDelta]] = {request_id: [] for request_id in order}
        self._num_shown = 0
        self._ends_line = True
        self._encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()

    @property
    def outputs(self) -> list[Output]:
        """The output of each request that has ended, in their order."""
        from ...gpu.session.text_session import join_deltas

        return [join_deltas(deltas) for deltas in self._parts.values() if deltas and deltas[-1].finish]

    def add(self, delta: TextDelta) -> None:
        self._parts[delta.request_id].append(delta)
        if not self._as_json:
            if delta.text:
                self._write(delta.text)
                self._ends_line = delta.text.endswith("\n")
            return
        if self._progress is not None:
            self._progress.add(len(delta.tokens), delta.finish is not None)
        if delta.finish is not None:
            self._show_finished()

    def close(self) -> None:
        """End the last line of a text, and remove the progress."""
        if self._progress is not None:
            self._progress.clear()
        if not self._ends_line:
            self._write("\n")
            self._ends_line = True

    def _show_finished(self) -> None:
        """Print all outputs up to the first that has not ended."""
        from ...gpu.session.text_session import join_deltas

        while self._num_shown < len(self._order):
            deltas = self._parts[self._order[self._num_shown]]
            if not deltas or deltas[-1].finish is None:
                return
            if self._progress is not None:
                self._progress.clear()
            self._write(output_line(join_deltas(deltas), ensure_ascii=self._encoding != "utf-8") + "\n")
            self._num_shown += 1

    def _write(self, text: str) -> None:
        """Write text; characters that standard output cannot encode become question marks."""
        if self._encoding != "utf-8":
            text = text.encode(self._encoding, "replace").decode(self._encoding)
        sys.stdout.write(text)
        sys.stdout.flush()


class DecodeProgress:
    """Counts ended requests and tokens, and shows them with the speed."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_ended = self._num_tokens = 0
        self._line = StatusLine(redraw_every_s=REDRAW_EVERY_S, line_every_s=LINE_EVERY_S)
        self.clear = self._line.clear

    def add(self, num_tokens: int, ended: bool) -> None:
        self._num_tokens += num_tokens
        self._num_ended += ended
        if (elapsed_s := self._line.due_s()) is not None:
            requests = f"{self._num_ended:,} of {count_of(self._num_requests, 'request')}"
            self._line.show(
                f"{requests}, {count_of(self._num_tokens, 'token')}, {self._num_tokens / elapsed_s:,.0f} tokens/s"
            )


def stats_text(stats: SessionStats, plan: SessionPlan) -> str:
    """Return the statistics of a run in some lines."""
    rate = f"{stats.tokens_per_s:,.1f} tokens/s" if stats.tokens_per_s is not None else "no time"
    requests = count_of(stats.requests, "request")
    lines = [
        f"{requests}: {stats.prompt_tokens:,} prompt and {stats.output_tokens:,} output tokens in {stats.seconds:.2f} s, {rate}"
    ]
    if stats.accept_length is not None:
        drafted = ""
        if stats.drafted:
            drafted = f", {100 * stats.correct_drafts / stats.drafted:.1f} % of {count_of(stats.drafted, 'drafted token')} accepted"
        lines.append(
            f"accept length {stats.accept_length:.2f} in {count_of(stats.rounds, 'round')}{drafted} ({_speculation(plan)})"
        )
    known = [(name, stats.latencies.get(f"median_{name}_ms")) for name in ("ttft", "tpot", "itl", "e2el")]
    medians = [f"{name.upper()} {value:.1f} ms" for name, value in known if value is not None]
    if medians:
        lines.append(f"medians: {', '.join(medians)}")
    for name in ("ttft", "itl"):
        tail = [stats.latencies.get(f"{part}_{name}_ms") for part in ("median", "p90", "p99")]
        if all(value is not None for value in tail):
            lines.append(f"{name.upper()} p50 {tail[0]:.1f}, p90 {tail[1]:.1f}, p99 {tail[2]:.1f} ms")
    for engine, slots in stats.ema_accept_len.items():
        averages = ", ".join(f"{ema:.2f} from {bound}" for bound, ema in slots.items())
        lines.append(f"{engine}: {stats.switches:,} switches of steps; EMA of correct drafts by batch size: {averages}")
    shares = {name: share for name, share in stats.shares().items() if share >= 0.0005}
    if shares:
        lines.append("time: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))
    if stats.cpu_share is not None and stats.cpu_share < BUSY_SHARE:
        lines.append(
            f"the machine was busy: {stats.cpu_seconds:.2f} s of processor time in {stats.seconds:.2f} s; other work had "
            "the cores for the rest, and all times above include it"
        )
    return "\n".join(lines)


def _speculation(plan: SessionPlan) -> str:
    """Return algorithm, steps and tree size in a few words."""
    spec = plan.spec
    if not plan.algorithm.is_speculative:
        return "plain decoding"
    steps = spec.adaptive.candidate_steps
    counts = count_of(steps[0], "step") if len(steps) == 1 else f"{spec.policy}: {', '.join(map(str, steps))} steps"
    nodes = dict.fromkeys(shape.nodes for shape in spec.draft_shape.round_shapes() if shape.nodes > 1)
    tree = f", trees of {', '.join(map(str, nodes))} nodes" if spec.topk > 1 else ""
    return f"{plan.algorithm.name}, {counts}{tree}"


def print_warm(
    device: str, algorithm: str, sizes: Sequence[int], as_json: bool, num_graphs: int = 0, notice: str = ""
) -> None:
    """Print what was compiled on a device, or what a GPU would capture: rounds of batches of `sizes`."""
    from ..documents.decoding import WarmDocument

    if as_json:
        print_document(WarmDocument(device, device != "cpu", num_graphs, list(sizes)))
    elif device == "cpu":
        batches = ", ".join(map(str, sizes))
        typer.echo(f"nothing to compile on a CPU; on a GPU: {algorithm}'s kernels, graphs of batches of {batches}")
    else:
        typer.echo("\n".join(filter(None, (f"{device}: kernels are compiled, {num_graphs} graphs fit", notice))))
