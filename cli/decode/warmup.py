"""`foredraft warmup`: what a first request would wait for, done before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..options import print_document
from .generate import Model
from .options import AsJson, Quiet, problems_name_options, session_values, with_session_options


@problems_name_options
@with_session_options
def warmup(model: Model, session: Mapping[str, Any], as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Compile the kernels of a session on this GPU, so that the next session starts at once.

    The command puts compiled kernels into Triton's cache. Sessions with the same
    model and options find them there. CUDA graphs exist only inside a process, so
    this command captures them only to show that they fit into memory and how long
    the capture takes. Give it the options of `generate` or `serve`.

        foredraft warmup --model models/target --draft models/eagle3

    On a CPU the command compiles nothing and prints what it would do on a GPU.
    """
    from ...core.scheduler.spec import default_graph_sizes
    from ...gpu.session.hub import local_checkpoint
    from ...gpu.session.plan import SessionOptions, plan_session, with_look_up
    from ...gpu.session.ready import make_ready
    from ...gpu.session.session import DecodeSession
    from ..documents.decoding import WarmupDocument
    from ..progress import StatusLine

    options = with_look_up(SessionOptions(local_checkpoint(model), **session_values(session)))
    plan = plan_session(options)
    if plan.device == "cpu":
        sizes = default_graph_sizes(plan.spec.config.max_running)
        if as_json:
            print_document(WarmupDocument(plan.device, False, 0, list(sizes)))
        else:
            batches = ", ".join(map(str, sizes))
            print(
                f"nothing to compile on a CPU; on a GPU: {plan.algorithm.name}'s kernels, graphs of batches of {batches}"
            )
        return
    progress = StatusLine(quiet)
    try:
        progress.show("loading the weights")
        opened = DecodeSession.open(options, plan=plan)
        ready = make_ready(opened, progress.show)
    finally:
        progress.clear()
    opened.close()
    if as_json:
        print_document(WarmupDocument(plan.device, True, ready.num_graphs, []))
    else:
        print(f"{plan.device}: kernels are compiled, {ready.num_graphs} graphs fit")
        if ready.notice:
            print(ready.notice)
