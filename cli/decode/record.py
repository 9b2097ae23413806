"""The files of `foredraft generate --out DIR`: events.jsonl, outputs.jsonl, summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observe.output_files import UnwritableFile, empty_run_directory, write_summary, write_text
from ..simulation import run_record
from ..simulation.run_record import EVENTS, SUMMARY

if TYPE_CHECKING:
    from ...core.contract.events import EventSink
    from ...core.scheduler.spec import EngineSpec
    from ...gpu.session.plan import SessionPlan
    from ...gpu.session.text_session import Output, SessionStats
    from ...observe.log import EventLog
    from ...observe.measuring.metrics import RunMetrics

OUTPUTS = "outputs.jsonl"
FILES = (EVENTS, OUTPUTS, SUMMARY)
_FILES_OF_ANY_RUN = dict.fromkeys((*FILES, *run_record.FILES))


class GenerationRecord:
    """Writes a run to `directory`, or nothing if it is None. Without `finish` the log is closed as incomplete."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._log: EventLog | None = None
        self._metrics: RunMetrics | None = None
        self._worker_facts: dict[str, Any] = {}

    def __enter__(self) -> GenerationRecord:
        if self.directory is None:
            return self
        empty_run_directory(self.directory, _FILES_OF_ANY_RUN)
        return self

    def __exit__(self, *error: object) -> None:
        self._close(complete=False)

    def make_sinks(self, spec: EngineSpec, plan: SessionPlan) -> Sequence[EventSink]:
        """Open the log, and return the event sinks of the engine that `spec` describes."""
        if self.directory is None:
            return ()
        from ...observe.log import EventLog
        from ...observe.measuring.metrics import RunMetrics

        header = {"engine": spec.to_json(), "run": run_facts(plan)}
        self._log = EventLog(self.directory / EVENTS, header)
        self._metrics = RunMetrics()
        return (self._log.sink(0), self._metrics.sink(0))

    def worker_logs(self, names: Sequence[str]) -> Mapping[str, Path] | None:
        """Return the path of each worker's log; None if there is no directory."""
        if self.directory is None:
            return None
        self._worker_facts = {"workers": list(names)}
        logs = {name: self.directory / name / EVENTS for name in names}
        try:
            for stale in self.directory.glob(f"*/{EVENTS}"):
                stale.unlink()
            for log in logs.values():
                log.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UnwritableFile(self.directory, error, "used for a run") from None
        return logs

    def finish(self, outputs: Sequence[Output], stats: SessionStats, plan: SessionPlan, complete: bool) -> None:
        """Close the log, write outputs and summary."""
        if self.directory is None:
            return
        shares = {f"share_{name}": share for name, share in stats.shares().items()}
        if self._metrics is None:
            metrics = counted(outputs, stats, incomplete=not complete)
        else:
            metrics = self._metrics.summary(incomplete=not complete)
        summary = {**run_facts(plan), **self._worker_facts, **metrics, **ema_of_slots(stats), **shares}
        self._close(complete)
        write_text(self.directory / OUTPUTS, "".join(output_line(output) + "\n" for output in outputs))
        write_summary(self.directory / SUMMARY, summary)

    def _close(self, complete: bool) -> None:
        with ExitStack() as closing:
            if self._metrics is not None:
                closing.callback(self._metrics.close)
            if self._log is not None:
                closing.callback(self._log.close, complete)


def output_line(output: Output, *, ensure_ascii: bool = False) -> str:
    """Return one output as a line of JSON: a `GenerateDocument`."""
    from ..documents.decoding import GenerateDocument

    logprobs = list(output.logprobs) if output.logprobs else None
    parts = (output.text, output.finish, list(output.tokens), logprobs, output.message)
    return json.dumps(GenerateDocument(output.request_id, *parts).to_json(), ensure_ascii=ensure_ascii)


def counted(outputs: Sequence[Output], stats: SessionStats, *, incomplete: bool) -> Mapping[str, Any]:
    """Return the counts of a run whose engines are in other processes, under the names of the metrics."""
    ends = [output.finish for output in outputs]
    return {
        "incomplete": incomplete,
        "submitted": stats.requests,
        "completed": ends.count("stop") + ends.count("length"),
        "failed": ends.count("error"),
        "refused": ends.count("refused"),
        "aborted": ends.count("aborted"),
        "duration": stats.seconds,
        "total_input_tokens": stats.prompt_tokens,
        "total_output_tokens": stats.output_tokens,
        "output_throughput": stats.tokens_per_s,
        "accept_length": stats.accept_length,
        "verified_rows": stats.verified_rows,
        "correct_drafts": stats.correct_drafts,
        "proposed_drafts": stats.drafted,
        "decode_rounds": stats.rounds,
        "switches": stats.switches,
        **stats.latencies,
    }


def ema_of_slots(stats: SessionStats) -> Mapping[str, Any]:
    """Return the EMA of each range of batch sizes: one number per engine that decodes."""
    bounds = dict.fromkeys(bound for slots in stats.ema_accept_len.values() for bound in slots)
    engines = stats.ema_accept_len.values()
    return {f"ema_accept_len_from_{bound}": [slots.get(bound) for slots in engines] for bound in bounds}


def run_facts(plan: SessionPlan) -> Mapping[str, Any]:
    """Return model, algorithm and device for the reader; a replay does not need them."""
    options = plan.options
    return {
        "model": str(options.model),
        "draft": None if options.draft is None else str(options.draft),
        "algorithm": plan.algorithm.name,
        "policy": plan.spec.policy,
        "device": plan.device,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "seed": options.seed,
    }
