"""`foredraft export`: the winner of a plan or a tune, or a table of draft steps, as files that servers take."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import AsJson, argument, option, print_document, refuse_without_effect
from .tables import export_table, is_table

if TYPE_CHECKING:
    from ...planning.servers.export.deployment import Export

WIDTH = 80

# fmt: off
Source = Annotated[str, argument("PLAN|TUNE|TABLE",
    "Directory of plan or tune, or a table of draft steps: a preset (default, with-zero, zero-to-seven) or a file.")]
Server = Annotated[str | None, option("--for",
    "Server that is to run it. Default: the server that was simulated; a table needs vllm, trtllm (1.3 or later) or "
    "sglang-VERSION.", "vllm|sglang|trtllm")]
Name = Annotated[str | None, option("--candidate", "Candidate of the plan, by its name. Default: the best.", "NAME")]
Out = Annotated[Path | None, option("--out",
    "Directory of the files. Default: export/ in that of the plan. Of a table: its file. Default: standard output.",
    "DIR|FILE")]
MaxBatchSize = Annotated[int | None, option("--max-batch-size",
    "Of a table, for vllm and trtllm: batch size at which the last range ends (--max-num-seqs). Default: 512.", min=1)]
# fmt: on


def export(
    source: Source,
    server: Server = None,
    candidate: Name = None,
    max_batch_size: MaxBatchSize = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Write the winner of a plan or a tune, or a table of draft steps, as files for those who run it.

    launch.sh is the launch command of one replica, beside the files that it
    names; with prefill and decode apart, SGLang has prefill.sh, decode.sh and
    router.sh. deployment.yaml has Kubernetes Deployments with the replicas; for
    vLLM values.yaml has the values of the chart llm-d-modelservice.
    scaling.json has what an autoscaler needs: the running requests and the
    requests per second of one replica at the limits of the plan. These and the
    replicas hold for the server that was simulated: another gets neither, and
    the files say so.

        foredraft plan chat.toml --set hardware.server=vllm-0.18 --out runs/chat
        foredraft export runs/chat
        foredraft export runs/chat --for sglang --candidate 'EAGLE3, 3 steps'
        foredraft export with-zero --for sglang-0.5.23 --out steps.json

    A table is written as SGLang's --speculative-adaptive-config has it, as the two
    keys of vLLM's --speculative-config, or as those under TensorRT-LLM's
    speculative_config. A table that the server cannot use is refused. The method
    and the draft head are not part of a table: the command says where the server
    takes them.
    """
    if is_table(source):
        why = "a table of steps has no candidates, and is printed as its server reads it"
        refuse_without_effect(("--candidate", candidate is not None, why), ("--json", as_json, why))
        export_table(source, server, max_batch_size, out)
        return
    refuse_without_effect(("--max-batch-size", max_batch_size is not None, "a plan or a tune has its batch size"))
    _export_winner(Path(source), server, candidate, out, as_json)


def _export_winner(source: Path, server: str | None, candidate: str | None, out: Path | None, as_json: bool) -> None:
    """Write the files of a plan or a tune beside it, and print the launch command."""
    from ...core.adaptive.config import PRESETS
    from ...core.errors import ConfigError, nearest
    from ...observe.output_files import UnwritableFile, write_text
    from ...planning.servers.export.deployment import SERVERS, server_of
    from ...planning.servers.export.deployment import export as export_scenario
    from ...planning.servers.export.winner import read_winner

    if server is not None and server not in SERVERS:
        *others, last = SERVERS
        message = f"expected {', '.join(others)} or {last}{nearest(server, SERVERS)}"
        raise ConfigError.of("--for", server, message)
    if not source.exists():
        message = f"no such directory or file{nearest(str(source), PRESETS)}; expected that of plan or tune, or a table"
        raise ConfigError.of(str(source), "", f"{message}: {', '.join(PRESETS)}, or a file")
    winner = read_winner(source, candidate)
    chosen = server or server_of(winner.scenario)
    found = export_scenario(winner.name, winner.scenario, chosen, winner.load, winner.is_tuned)
    place = out or source / "export"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(place, error) from None
    for file, text in found.files.items():
        write_text(place / file, text, replace=True)
    if as_json:
        print_document(found)
    else:
        typer.echo("\n".join(_lines(found, place)))


def _lines(found: Export, place: Path) -> list[str]:
    replicas = "replicas" if found.replicas is None else count_of(found.replicas, "replica")
    gpus = count_of(found.gpus_per_replica, "GPU")
    heading = f"{found.name}: {replicas} of {found.server} with {gpus} each"
    lines = [*textwrap.wrap(heading, WIDTH), ""]
    for file, command in found.commands.items():
        lines += [*([f"{file}:"] if len(found.commands) > 1 else []), command, ""]
    texts = []
    if (load := found.load) is not None:
        texts.append(
            f"A replica holds {load.requests_per_s:.3g} requests/s within {', '.join(load.limits)}: "
            f"{load.running:.3g} requests run in it then ({found.metric}), {load.tokens_per_s:,.0f} output tokens/s."
        )
    texts += [f"To do: {note}." for note in found.notes]
    texts.append(f"Written to {place}: {', '.join(found.files)}.")
    return [*lines, *(line for text in texts for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False))]
