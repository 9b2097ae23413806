"""Tables of adaptive steps, as `foredraft tune --table` prints and `foredraft export` writes them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ...core.adaptive.config import AdaptiveConfig

BESIDE = {  # server -> what it needs beside the table
    "sglang": "SGLang takes the file by --speculative-adaptive --speculative-adaptive-config FILE, and needs "
    "--speculative-algorithm (such as EAGLE3) and --speculative-draft-model-path (the head)",
    "vllm": '--speculative-config needs "method" (such as "eagle3") and "model" (the head), too',
    "trtllm": "speculative_config needs decoding_type (such as Eagle3) and speculative_model (the head), too",
}


def print_table(given: str, out: Path | None) -> None:
    """Print a table in our format with every key of every range, or write it to `out`. Raises ConfigError."""
    config = _read(given)
    lines = []
    for bound, slot in zip(config.bounds, config.slots, strict=True):
        entry = {key: value for key, value in asdict(slot).items() if value is not None}
        if isinstance(slot.num_draft_tokens, tuple):
            entry["num_draft_tokens"] = {str(steps): nodes for steps, nodes in slot.num_draft_tokens}
        lines.append(f'  "{bound}": {json.dumps(entry)}')
    _write("{\n" + ",\n".join(lines) + "\n}", out)


def is_table(given: str) -> bool:
    """Return whether a name is that of a table of steps: a preset, a JSON text, or a file; a directory is a search."""
    from ...core.adaptive.config import PRESETS

    return not os.path.isdir(given) and (given in PRESETS or given.lstrip()[:1] == "{" or os.path.isfile(given))


def export_table(given: str, server: str | None, max_batch_size: int | None, out: Path | None) -> None:
    """Write a table as the file of a server; say on standard error what the server needs beside it.

    `max_batch_size` ends the last range for vLLM and TensorRT-LLM; None: 512. Raises ConfigError.
    """
    from ...core.adaptive.interchange import TARGETS
    from ...core.adaptive.interchange import export_table as text_for
    from ...core.errors import ConfigError

    if server is None:
        raise ConfigError.of("<arguments>", "--for", f"is missing: a table is written for {TARGETS}")
    _write(text_for(_read(given), server, max_batch_size or 512), out)
    typer.echo(f"foredraft: {BESIDE[server.partition('-')[0]]}", err=True)


def _read(given: str) -> AdaptiveConfig:
    """Return the table of a preset, a JSON text, or a file: ours, or that of SGLang, vLLM or TensorRT-LLM. Says on
    standard error what was left out."""
    from ...core.adaptive.config import load_adaptive_config
    from ...core.adaptive.interchange import import_table
    from ...observe.input_files import read_text

    is_file = os.path.isfile(given)
    config = import_table(read_text(given), given) if is_file else load_adaptive_config(given, read_file=read_text)
    for notice in config.notices:
        typer.echo(notice, err=True)
    return config


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text)
    else:
        from ...observe.output_files import write_text

        write_text(out, text + "\n", replace=True)
