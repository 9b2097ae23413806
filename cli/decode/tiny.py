"""`foredraft tiny`: train a small target and its drafts, to try decoding."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import AsJson, Quiet, argument, option, print_document
from ..terminal import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from ...gpu.tiny.pair import MadePair

REPORT_WIDTH = 120  # columns of the report; a narrower terminal wraps its lines instead of cutting them

# fmt: off
Directory = Annotated[Path | None, argument("DIR",
    "Directory of the pair. Default: foredraft/SIZE in the user's cache.")]
Size = Annotated[str, option("--size", "Size and time: nano (seconds) or tiny (about a minute on two CPU cores).")]
Seed = Annotated[int, option("--seed", "Seed of the weights and training batches.", min=0)]
# fmt: on


def tiny(
    directory: Directory = None, size: Size = "tiny", seed: Seed = 0, as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train a small language model and four drafts for it.

    The models learn from short Python modules that are made up. Training is as
    long on every machine, counted in steps. The command saves Hugging Face
    checkpoints:

        DIR/target              a Llama with tokenizer and chat template
        DIR/draft               a smaller Llama (STANDALONE)
        DIR/eagle3              an EAGLE-3 head
        DIR/multi_layer_eagle   one EAGLE head per step
        DIR/dflash              a block drafter
        DIR/pair.json           options, versions, losses, accept lengths

        foredraft tiny
        foredraft tiny pairs/seven --seed 7
        foredraft tiny --size nano

    The command does not train an existing pair again. Ctrl-C keeps the finished
    parts, and the same command continues from them. Each part is compared with
    what knows nothing (token frequencies, the untrained draft); the report says
    which parts have learnt no more than that, and what to do.
    """
    # Waiting threads must not spin, which would take the cores of other work; torch reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ...gpu.tiny.pair import make_pair
    from ...gpu.tiny.sizes import PairOptions, partial_directory, size_of
    from ..progress import training_progress

    options = PairOptions(size_of(size), seed)
    directory = default_directory(size, seed) if directory is None else directory
    try:
        with training_progress(quiet) as show:
            pair = make_pair(directory, options, show)
    except KeyboardInterrupt:
        partial = partial_directory(directory, options)
        kept = (
            f"; the finished parts are in {partial}, and the same command continues from them"
            if partial.is_dir()
            else ""
        )
        print(f"foredraft: interrupted{kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        from ..documents.decoding import TinyDocument

        print_document(TinyDocument(str(pair.directory), pair.reused, pair.summary))
    else:
        _print_report(pair)


def default_directory(size: str, seed: int = 0) -> Path:
    """Return the pair's directory in the user's cache; other options have other directories."""
    from ...observe.output_files import cache_directory

    return cache_directory() / (size if seed == 0 else f"{size}-seed{seed}")


def _print_report(pair: MadePair) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    summary = pair.summary
    there = "is already there" if pair.reused else "is ready"
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, REPORT_WIDTH) if sys.stdout.isatty() else REPORT_WIDTH
    console.print(f"The pair ({summary['described']}) {there}: {pair.directory}", markup=False)
    parts = summary["parts"]
    # JSON has strings for keys.
    chains = sorted({int(steps) for part in parts.values() for steps in part.get("accept_lengths", ())})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("part", no_wrap=True)
    for title in ("parameters", "MB", "loss", "agrees", "untrained", *(f"S={steps}" for steps in chains)):
        table.add_column(title, justify="right", no_wrap=True)
    for name, part in parts.items():
        table.add_row(name, *_cells(part, chains))
    console.print(table)
    console.print(
        "loss: nats per token; for the target on held-out modules, for a draft against the target in training. agrees: how\n"
        "often a draft's first token is the target's; untrained: the same before its training. S=n: tokens per greedy round\n"
        "with chains of n draft tokens. These are of the target's own continuations of held-out modules.",
        markup=False,
    )
    if found := learnt_nothing(summary):
        console.print(f"\n{found}", markup=False)


def learnt_nothing(summary: dict[str, Any]) -> str:
    """Say which parts have learnt nothing, how one sees it, and what to do; empty if all have learnt something."""
    parts, reasons = summary["parts"], []
    for name, part in parts.items():
        if part.get("has_learnt", True):
            continue
        if "agreement" in part:
            reasons.append(f"{name} agrees no more often than before its training ({part['untrained_agreement']:.0%})")
        elif part["held_out_loss"] >= part["frequency_loss"]:
            reasons.append(
                f"{name} has a loss of {part['held_out_loss']:.2f}, token frequencies alone one of "
                f"{part['frequency_loss']:.2f}"
            )
        else:
            reasons.append(f"of the tokens that {name} writes {part['repeats']:.0%} repeat the one before")
    if not reasons:
        return ""
    return (
        f"This pair has learnt too little: {'; '.join(reasons)}. Speeds and accept lengths of its drafts mean nothing. "
        "Train one of a larger --size, or with another --seed, in another directory."
    )


def _cells(part: dict[str, Any], chains: list[int]) -> list[str]:
    loss = part.get("held_out_loss", part["loss"])
    cells = [f"{part['parameters']:,}", f"{part['bytes'] / 1e6:.1f}", f"{loss:.2f}"]
    if "agreement" not in part:
        return cells
    lengths = {int(steps): length for steps, length in part["accept_lengths"].items()}
    shares = (f"{part[key]:.0%}" if key in part else "" for key in ("agreement", "untrained_agreement"))
    return [*cells, *shares, *(f"{lengths[n]:.2f}" if n in lengths else "" for n in chains)]
