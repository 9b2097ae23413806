"""`foredraft selftest`: whether everything is right on this machine, and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import output_option, print_document
from .options import AsJson, Quiet, engine_option, problems_name_options, with_session_options

Out = Annotated[Path, output_option("--out", "Directory of selftest.md and selftest.json.", "DIR")]
Budget = Annotated[
    str, engine_option("--budget", "Time for the whole test; steps that would start later do not run.", "10m")
]


@problems_name_options
@with_session_options("device", "ops")
def selftest(
    session: Mapping[str, Any],
    out: Out = Path("selftest"),
    budget: Budget = "10m",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test decoding on this machine, the most basic parts first, then measure its speed.

    Tests device, driver and versions, and the kernels of a forward pass at the
    sizes of real models; where FlashInfer is installed also its attention and its
    filters, at the same sizes. Runs the contracts of acceptance and of the executor
    on the device, as `foredraft check executor --device` does: random requests with
    each kind of draft, overlap, retraction and sampling, with every index checked
    and with captured rounds. Runs sessions in bfloat16. Then prints a table of an
    8B model with random weights and simulated acceptance: plain decoding, chains
    and trees at batch sizes 1, 8 and 32.

        foredraft selftest
        foredraft selftest --device cuda --out reports/h100 --budget 20m

    A step that fails does not stop the others: on a GPU the steps run in a
    separate process, and if that process dies a new one continues. The report
    contains the traceback. The command rewrites the report after every step, so
    after Ctrl-C the report covers the finished steps. On a CPU shapes are small,
    and the report lists the steps that need a GPU as not run.

    The exit code is 0 if no step failed, 1 if one did, 130 after Ctrl-C.
    """
    from ...checks import selftest as test
    from ...gpu.selftest.report import closing_lines, exit_code
    from ..progress import StatusLine

    progress = StatusLine(quiet)
    try:
        report = test.selftest(session["device"], out, budget, progress.show, session["ops"])
    finally:
        progress.clear()
    if as_json:
        from ..documents.decoding import SelftestDocument

        print_document(SelftestDocument(report.ok, str(report.directory), report.document()))
    else:
        print("\n".join(closing_lines(report)))
    raise typer.Exit(exit_code(report))
