"""Recognises files that tell how many drafts were accepted, by their first line, and reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines
from .acceptance_logs import AcceptanceLog, read_events, read_responses, wrong
from .acceptance_means import CSV_HEADER, EXPECTED, MeanAcceptance, read_means, read_pages, read_server_logs

_PAGE_BEGINS = ("# HELP ", "# TYPE ", "vllm:", "sglang:")

_WITHOUT_STEPS = ("a page of metrics", "a server's log")


def read_acceptance(
    paths: Sequence[str], steps: int | None = None, allow_truncated: bool = False
) -> AcceptanceLog | MeanAcceptance:
    """Read files of one kind; a directory stands for its `events.jsonl`.

    steps: of the drafts, where means do not say them. allow_truncated: read events that have no end.

    Errors: ConfigError and LogError, with file and line.
    """
    paths = [os.path.join(path, "events.jsonl") if Path(path).is_dir() else path for path in paths]
    if twice := [path for i, path in enumerate(paths) if path in paths[:i]]:
        raise wrong(twice[0], 0, "is given twice, and would count twice")
    kinds = [_kind(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise wrong(path, 0, f"is {kind}, but {paths[0]} is {kinds[0]}: expected files of one kind")
    if steps is not None and kinds[0] not in _WITHOUT_STEPS:
        raise wrong(paths[0], 0, f"is {kinds[0]}, which say their steps themselves: leave --steps out")
    if kinds[0] == "events":
        return read_events(paths, allow_truncated)
    if kinds[0] == "responses":
        return read_responses(paths)
    if kinds[0] == "means":
        return read_means(paths)
    return read_pages(paths, steps) if kinds[0] == "a page of metrics" else read_server_logs(paths, steps)


def _kind(path: str) -> str:
    line = next((line.strip() for line in read_lines(path) if line.strip()), "")
    if not line:
        raise wrong(path, 0, f"is empty: expected {EXPECTED}")
    if line.startswith(("{", "[{", "data:")) or line == "[":
        try:
            value = parse_json(line)
        except ParseError:
            return "responses"
        return "events" if isinstance(value, dict) and "t" in value else "responses"
    if [cell.strip() for cell in line.split(",")] == CSV_HEADER.split(","):
        return "means"
    return "a page of metrics" if line.startswith(_PAGE_BEGINS) else "a server's log"
