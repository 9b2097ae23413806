"""`foredraft adaptive`: tables of steps in our format, and in those of SGLang, vLLM and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..options import argument, option

Table = Annotated[str, argument(None, "A preset (default, with-zero, zero-to-seven) or a JSON file.")]
Out = Annotated[Path | None, option("--out", "Write to this file instead of standard output.")]


class _GroupWithKeys(TyperGroup):
    """Adds the keys of a table to the group's help, when that is asked for."""

    def get_help(self, ctx: Any) -> str:
        self.epilog = "\n\n".join(_keys())
        return super().get_help(ctx)


adaptive = typer.Typer(cls=_GroupWithKeys, no_args_is_help=True)


@adaptive.callback()
def tables() -> None:
    """Show, export and import tables of adaptive steps.

    A table is a JSON object. A key of digits is the smallest batch size of a
    range; its value holds the keys of that range. Keys beside the ranges are
    defaults for all ranges. See docs/planning.md.
    """


@adaptive.command()
def show(
    table: Table = "default",
) -> None:
    """Print a table with every key of every range.

    foredraft adaptive show with-zero
    """
    import json
    from dataclasses import asdict

    from ...core.adaptive.config import load_adaptive_config
    from ...observe.input_files import read_text

    config = load_adaptive_config(table, read_file=read_text)
    _print_notices(config.notices)
    ranges = zip(config.bounds, config.slots, strict=True)
    lines = [f'  "{bound}": {json.dumps(asdict(slot))}' for bound, slot in ranges]
    typer.echo("{\n" + ",\n".join(lines) + "\n}")


BESIDE = {  # server -> what it needs beside the table
    "sglang": "SGLang takes the file by --speculative-adaptive --speculative-adaptive-config FILE, and needs "
    "--speculative-algorithm (such as EAGLE3) and --speculative-draft-model-path (the head)",
    "vllm": '--speculative-config needs "method" (such as "eagle3") and "model" (the head), too',
    "trtllm": "speculative_config needs decoding_type (such as Eagle3) and speculative_model (the head), too",
}

Target = Annotated[
    str,
    option(
        "--for",
        "Server to write for: sglang-VERSION (such as sglang-0.5.23), vllm, or trtllm (1.3 or later).",
        "SERVER",
    ),
]
MaxBatchSize = Annotated[
    int,
    option(
        "--max-batch-size", "With vllm and trtllm: batch size at which the last range ends (--max-num-seqs).", min=1
    ),
]


@adaptive.command("export")
def export_(
    table: Table,
    target: Target,
    max_batch_size: MaxBatchSize = 512,
    out: Out = None,
) -> None:
    """Write a table for another server; refuse a table that the server cannot use.

    SGLang takes the file by --speculative-adaptive-config. vLLM takes the two
    keys in --speculative-config, TensorRT-LLM under speculative_config; each of
    their ranges has one number of steps. The method and the draft head are not
    part of a table: the command says where the server takes them.

        foredraft adaptive export with-zero --for sglang-0.5.23 --out steps.json
    """
    from ...core.adaptive.config import load_adaptive_config
    from ...core.adaptive.interchange import export_table
    from ...observe.input_files import read_text

    config = load_adaptive_config(table, read_file=read_text)
    _print_notices(config.notices)
    _write(export_table(config, target, max_batch_size), out)
    typer.echo(f"foredraft: {BESIDE[target.partition('-')[0]]}", err=True)


File = Annotated[
    Path, argument(None, "SGLang's adaptive file, the JSON of vLLM's --speculative-config, or TensorRT-LLM's YAML.")
]


@adaptive.command("import")
def import_(
    file: File,
    out: Out = None,
) -> None:
    """Read a table of another server and write it in our format.

    foredraft adaptive import speculative-config.json --out steps.json foredraft
    simulate --set speculation.adaptive=steps.json
    """
    from ...core.adaptive.interchange import import_table, to_json
    from ...observe.input_files import read_text

    config = import_table(read_text(file), str(file))
    _print_notices(config.notices)
    _write(to_json(config), out)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text)
    else:
        from ...observe.output_files import write_text

        write_text(out, text + "\n", replace=True)


def _print_notices(notices: Iterable[str]) -> None:
    for notice in notices:
        typer.echo(notice, err=True)


def _keys() -> list[str]:
    from dataclasses import fields

    from ...core.adaptive.config import SlotConfig

    lines = ["Keys of a range, with their defaults:"]
    for key in fields(SlotConfig):
        default = f" ({key.default})" if isinstance(key.default, int | float) else ""
        lines.append(f"{key.name}{default}: {key.metadata['meaning']}")
    return lines
