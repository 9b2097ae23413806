"""`foredraft ui`: a page in the browser that answers what the commands answer, while its sliders move."""

from __future__ import annotations

import sys
import webbrowser
from typing import Annotated

from .options import ScenarioFile, Settings, TraceFile, option
from .simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from .simulation.simulate import given_by_options

Port = Annotated[int, option("--port", "Port to listen on; 0 chooses a free port.", min=0, max=65535)]
Open = Annotated[bool, option("--open", "Open the page in the browser of this machine.")]


def ui(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    settings: Settings = None, trace: TraceFile = None, port: Port = 8470, open_page: Open = False,
) -> None:  # fmt: skip
    """Show doctor, simulation and plan on a page in the browser, with sliders.

    The page begins with the given scenario, and with the default one without it.
    Each change shows at once what a round costs and whether speculation pays, then
    a simulation; `plan` runs when you ask for it. The page takes a scenario file, a
    trace or a launch command that you drop or paste, and shows the scenario and the
    command that say the same. Its address keeps its state.

        foredraft ui
        foredraft ui chat.toml --set hardware.gpu=H200 --open
        foredraft ui --from-vllm 'vllm serve Qwen/Qwen3-32B -tp 4'

    Only this machine can open the page, and it loads nothing from the network.
    Ctrl-C ends the server and all that it computes.
    """
    from ..serve.base.connections import bind
    from ..sim.scenario_file import load_scenario
    from ..ui.choices import choices
    from ..ui.server import PageServer

    listener = bind("127.0.0.1", port)
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, None)], launch)

    def tell(address: str) -> None:
        print(f"foredraft: the page is at {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        if open_page:
            webbrowser.open(address)

    PageServer(choices(resolved), listener, tell).run()
