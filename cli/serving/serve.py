"""`foredraft serve`: OpenAI's interface over a checkpoint, or over a simulated deployment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..decode.options import (
    OPTIONAL_MODEL,
    SESSION,
    Disaggregate,
    GenerationConfig,
    engine_option,
    given_session_options,
    model_option,
    problems_name_options,
    session_values,
    with_session_options,
)
from ..logs import DEFAULT_FORMAT, LogFormat, LogLevel, start_logging
from ..options import AS_JSON, Settings, in_panel, mode_of, only_with, refuse_without_effect
from ..simulation.simulate import Faults
from .ahead import captures_ahead, get_ready, warm
from .operations import ServeOperations, with_operations

if TYPE_CHECKING:
    from ...core.contract.events import EventSink
    from ...gpu.session.plan import SessionOptions
    from ...serve.base.limits import Limits
    from ...serve.base.port import Body, TextCodec
    from ...serve.requests.faults import Admin, RequestFaults
    from ...serve.telemetry.log_lines import ServerLog
    from ...serve.telemetry.recording import Recording
    from ...sim.faults.plan import FaultPlan
    from ...sim.scenario import Scenario

KEY = "FOREDRAFT_API_KEY"
server_option, limits_option = in_panel("HttpServer"), in_panel("Limits")

# fmt: off
Simulate = Annotated[Path | None, model_option("--simulate",
    "Scenario to simulate instead, as for foredraft simulate; needs no model.", "SCENARIO.toml")]
Speed = Annotated[float | None, engine_option("--speed",
    "With --simulate: simulated seconds per real second. Default: 1.", "FACTOR")]
Seed = Annotated[int | None, engine_option("--seed",
    "Seed of every random draw. Default: 0, or the seed of the scenario.", min=0)]
Host = Annotated[str, server_option("--host",
    "Address to listen on. The default accepts only clients on this machine.")]
Port = Annotated[int, server_option("--port", "Port to listen on; 0 chooses a free port.", min=0, max=65535)]
ApiKey = Annotated[str | None, server_option("--api-key",
    "Key that clients must send. The variable is safer: other users can see a command line.",
    "KEY", envvar=KEY)]
MetricsAs = Annotated[str, server_option("--metrics-as",
    "Server whose names the metrics use: foredraft, vllm, sglang.")]
Dialect = Annotated[str | None, server_option("--dialect",
    "With --simulate: server whose clients are understood: openai, vllm (smaller priorities are first), sglang (any "
    "model, stream_options without a stream). Default: openai.")]
Strict = Annotated[bool, server_option("--strict",
    "With --simulate: refuse a request with a parameter that is unknown or has no effect. By default it is left out, and "
    "the log names it once. With --model the server always refuses.")]
AccessLog = Annotated[bool, server_option("--access-log", "Write a line for each request that has been answered.")]
FaultHeaders = Annotated[bool, server_option("--fault-headers",
    "Do what the headers X-Fault (503, reset, stall, slow) and X-Delay-Ms of a request ask for.")]
AdminPort = Annotated[int | None, server_option("--admin-port",
    "Port on 127.0.0.1 for PUT, GET and DELETE of /faults: a fault for a share of all requests. 0 chooses one.",
    min=0, max=65535)]
StartS = Annotated[float | None, server_option("--start-s",
    "With --simulate: simulated seconds that a start takes; until then /ready, /health and requests get 503.", min=0)]
Record = Annotated[Path | None, server_option("--record",
    "Write the decision log for foredraft audit --replay to a new folder of this directory, named by the time of the start. It "
    "grows with every round.", "DIR")]
Stamp = Annotated[bool, server_option("--stamp",
    "Begin each event of a stream with a comment that gives the end of its round, in nanoseconds of Unix time.")]
ReadyS = Annotated[float | None, server_option("--ready-s",
    "With --model on a GPU: most seconds for capturing rounds as CUDA graphs before the first request. What is left out "
    "runs without a graph. Default: 120.", min=0)]
DrainS = Annotated[float, server_option("--drain-s", "Seconds that running requests have to end after SIGTERM.", min=1)]
MaxStreams = Annotated[int, limits_option("--max-streams",
    "Most outputs at once, running and waiting; further requests get status 429.")]
MaxBody = Annotated[int, limits_option("--max-body-bytes", "Largest body of a request, in bytes.")]
MaxPrompt = Annotated[int | None, limits_option("--max-prompt-tokens",
    "Longest prompt, in tokens. Default: the room in context and KV pool.")]
MaxChoices = Annotated[int, limits_option("--max-choices", "Most outputs of one request: n times prompts.")]
DeadlineS = Annotated[float, limits_option("--deadline-s", "Most seconds for a whole answer.")]
StallS = Annotated[float, limits_option("--stall-s",
    "Seconds after which the server drops a client that sends or takes nothing.")]
WarmOnly = Annotated[bool, server_option("--warm-only",
    "Compile the kernels of a server with this model on this GPU, try whether its CUDA graphs fit, and exit.")]
AsJson = Annotated[bool, only_with("--warm-only")("--json", AS_JSON)]
Quiet = Annotated[bool, only_with("--warm-only")("--quiet -q", "Print no progress on standard error.")]
# fmt: on
MODES = {"--warm-only": {"seed", "ready_s", *SESSION}}


@problems_name_options
@with_session_options(model=OPTIONAL_MODEL)
@with_operations
def serve(
    ctx: typer.Context, session: Mapping[str, Any], simulate: Simulate = None, *,
    disaggregate: Disaggregate = None, generation_config: GenerationConfig = "auto",
    operations: Mapping[str, Any], settings: Settings = None,
    faults: Faults = None, speed: Speed = None, seed: Seed = None,
    host: Host = "127.0.0.1", port: Port = 8000, api_key: ApiKey = None,
    metrics_as: MetricsAs = "foredraft", dialect: Dialect = None, strict: Strict = False, access_log: AccessLog = False,
    fault_headers: FaultHeaders = False, admin_port: AdminPort = None, start_s: StartS = None,
    record: Record = None, stamp: Stamp = False, drain_s: DrainS = 30.0, ready_s: ReadyS = None,
    max_streams: MaxStreams = 512, max_body_bytes: MaxBody = 8 << 20, max_prompt_tokens: MaxPrompt = None,
    max_choices: MaxChoices = 16, deadline_s: DeadlineS = 600.0, stall_s: StallS = 30.0,
    log_level: LogLevel = None, log_format: LogFormat = DEFAULT_FORMAT,
    warm_only: WarmOnly = False, as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Serve OpenAI's interface: decode a checkpoint, or simulate a deployment in real time.

    A simulated server answers with filler text. The answers come at the times
    that the deployment of the scenario would have, with its queues, speculation
    and prefix cache.

        foredraft serve --model models/target --draft models/eagle3
        foredraft serve --model models/target --draft models/eagle3 \\
            --disaggregate prefill=1,decode=2
        foredraft serve --simulate examples/chat_on_h100.toml
        foredraft serve --simulate scenario.toml --speed 10 --record runs/served
        curl http://127.0.0.1:8000/v1/completions \\
            -H 'Content-Type: application/json' \\
            -d '{"prompt": "Why sing?", "max_tokens": 32, "stream": true}'
        foredraft audit --replay runs/served/2026-11-27T08-00-00Z
        foredraft serve --warm-only --model models/target --draft models/eagle3

    After SIGTERM or Ctrl-C running requests may end; a second signal gives them
    up. SIGHUP makes the server read the adaptive table again. On bad input the
    command prints one message and exits with code 2. After --warm-only servers and
    sessions with these options find the kernels in Triton's cache.
    """
    if mode_of(ctx, MODES):
        warm(_session_of(session, seed), ready_s, as_json, quiet)
        return
    from ...serve.base.limits import Limits
    from ...serve.metrics import STYLES
    from ...serve.requests.api import DIALECTS
    from ...serve.telemetry.recording import Recording

    log, model = _start_log(log_level, log_format), session["model"]
    _check_choice(model, simulate)
    limits = Limits(max_streams, max_body_bytes, max_prompt_tokens, max_choices, deadline_s, stall_s)
    _refuse_unknown("--metrics-as", metrics_as, STYLES)
    _refuse_unknown("--dialect", dialect or "openai", DIALECTS)
    asked = ServeOperations(**operations)
    _check_key(api_key, host if asked.uds is None else "localhost", log)
    with asked.listen(host, port) as listener, Recording(record) as recording, ExitStack() as workers:
        if model is not None:
            ignored = {"settings": settings, "faults": faults, "speed": speed, "dialect": dialect, "start_s": start_s}
            ignored |= {"strict": strict or None, **asked.of_simulations}
            _refuse_for("--model", "a checkpoint is decoded", ignored, {"settings": "--set"})
            options, table = _session_of(session, seed), session["adaptive"]
            body = _decoding_body(options, generation_config, disaggregate, asked, recording, log, ready_s, workers)
        else:
            _refuse_of_checkpoints(session, disaggregate, generation_config, ready_s)
            assert simulate is not None, "one of them is given"
            body, table = _simulated_body(simulate, settings, seed, speed, faults, asked.make_codec(), recording, log)
        watched = Path(table) if table is not None and os.path.isfile(table) else None
        faults_on_demand = _faults_on_demand(fault_headers, admin_port, log)
        _run(
            body, limits, recording, watched, *faults_on_demand, log=log, access_log=access_log, start_s=start_s or 0.0,
            operations=asked, host=host, listener=listener, drain_s=drain_s, stamp=stamp,
            api_key=api_key, **asked.names, metrics_as=metrics_as, dialect=dialect or "openai", strict=strict,
            tool_call_share=asked.tool_call_share or 0.0,
        )  # fmt: skip


def _session_of(session: Mapping[str, Any], seed: int | None) -> SessionOptions:
    """Return the options of the session that a server has; checkpoints of the hub are on this machine then."""
    from ...core.errors import ConfigError
    from ...gpu.session.plan import SessionOptions

    if session["model"] is None:
        raise ConfigError.of("<arguments>", "--model", "is missing: --warm-only compiles the kernels of a checkpoint")
    return SessionOptions(**session_values(session), seed=seed or 0, multi_step_rounds=1)


def _check_choice(model: Path | None, simulate: Path | None) -> None:
    from ...core.errors import ConfigError

    if (model is None) == (simulate is None):
        message = "give exactly one of them: a checkpoint to decode, or a scenario to simulate"
        raise ConfigError.of("<arguments>", "--model or --simulate", message)


def _check_key(api_key: str | None, host: str, log: ServerLog) -> None:
    """Refuse an empty key, which would let everyone in; warn if the server is open to other machines without one."""
    import ipaddress

    from ...core.errors import ConfigError

    if (os.environ.get(KEY) if api_key is None else api_key.strip()) == "":
        message = "is empty, and the server would be open; give a key, or unset the variable"
        raise ConfigError.of("<arguments>", f"--api-key, {KEY}", message)
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if api_key is None and not is_local:
        log.tell(f"note: everyone who reaches {host} can use the server; give a key by {KEY}")


def _start_log(level: str | None, form: str) -> ServerLog:
    """Return the log in the form that was given; lines of engines are written from `level` on."""
    from ...observe.engine_lines import FORMATS
    from ...serve.telemetry.log_lines import ServerLog

    _refuse_unknown("--log-format", form, FORMATS)
    start_logging(level, form if level is not None else DEFAULT_FORMAT)
    log = ServerLog(form == "json")
    log.take_over()
    return log


def _refuse_unknown(name: str, value: str, known: Iterable[str]) -> None:
    from ...core.errors import ConfigError, nearest

    names = tuple(known)
    if value not in names:
        raise ConfigError.of("<arguments>", name, f"{value!r} is none of {', '.join(names)}{nearest(value, names)}")


def _refuse_for(kind: str, why: str, given: dict[str, Any], names: dict[str, str]) -> None:
    """Refuse options that the chosen body makes no use of."""
    rules = [
        (names.get(name, f"--{name.replace('_', '-')}"), value is not None, f"with {kind}, {why}")
        for name, value in given.items()
    ]
    refuse_without_effect(*rules)


def _refuse_of_checkpoints(
    session: Mapping[str, Any], disaggregate: str | None, generation_config: str, ready_s: float | None
) -> None:
    """Refuse options that only a server with a checkpoint makes use of."""
    _refuse_for("--simulate", "nothing is captured", {"ready_s": ready_s}, {})
    unused = given_session_options(session) | {"disaggregate": disaggregate}
    unused |= {"generation_config": None if generation_config == "auto" else generation_config}
    _refuse_for("--simulate", "the scenario has a key for it: set that key with --set", unused, {})


def _decoding_body(
    options: SessionOptions,
    generation_config: str,
    disaggregate: str | None,
    operations: ServeOperations,
    recording: Recording,
    log: ServerLog,
    ready_s: float | None,
    workers: ExitStack,
) -> Body:
    """Return the body that decodes in this process, or with processes that end with the stack `workers`; its requests
    have the sampling parameters of the model's files where they name none."""
    defaults = _file_defaults(options.model, generation_config, log)
    if disaggregate is None:
        body = _real_body(options, recording, log, ready_s)
    else:
        from .workers import refuse_with_workers, workers_body

        refuse_with_workers(operations)
        body = workers.enter_context(workers_body(options, disaggregate, recording, log, ready_s))
    body.defaults = defaults
    return body


def _real_body(options: SessionOptions, recording: Recording, log: ServerLog, ready_s: float | None) -> Body:
    """Load the models and make the session ready, before the server listens."""
    from ...gpu.session.plan import plan_session, refuse_without_effect
    from ...gpu.session.ready import make_ready
    from ...gpu.session.session import DecodeSession, check_vocabulary
    from ...gpu.session.text import Tokenizer
    from ...serve.bodies.real import RealBody
    from ..decode.record import run_facts

    tokenizer = Tokenizer.load(options.model)
    plan = plan_session(options)
    refuse_without_effect(plan.options, plan.algorithm, plan.device)
    for notice in plan.notices:
        log.tell(f"note: {notice}")
    check_vocabulary(tokenizer, plan)

    def sinks(spec: Any) -> Sequence[EventSink]:
        return recording.sinks(lambda: {"engine": spec.to_json(), "run": run_facts(plan)})(0)

    is_captured = captures_ahead(plan, ready_s)
    session = DecodeSession.open(options, plan=plan, tokenizer=tokenizer, make_sinks=sinks)
    if is_captured:
        get_ready(partial(make_ready, session), ready_s, log)
    return RealBody(session, options.model.resolve().name)


def _file_defaults(model: Path, generation_config: str, log: ServerLog) -> Mapping[str, Any]:
    """Return the sampling parameters that the files of a model give to requests that leave them out, and say so."""
    from ...core.contract.request import SamplingParams
    from ...gpu.session.prompts import defaults_note, file_defaults

    defaults = file_defaults(model, generation_config)
    if note := defaults_note(model, defaults, asdict(SamplingParams(1.0))):
        log.tell(f"note: {note}")
    return defaults


def _simulated_body(
    file: Path,
    settings: Sequence[str] | None,
    seed: int | None,
    speed: float | None,
    faults: str | None,
    make_codec: Callable[[], TextCodec],
    recording: Recording,
    log: ServerLog,
) -> tuple[Body, str | None]:
    from ...core.errors import ConfigError
    from ...serve.bodies.live import live_scenario, with_its_table
    from ...serve.bodies.simulated import SimulatedBody
    from ...sim.scenario_file import load_scenario
    from ..simulation.simulate import errors_at, given_by_options

    if speed is not None and not 0 < speed < float("inf"):
        raise ConfigError.of("<arguments>", "speed", f"must be positive, got {speed}")
    scenario, origins = load_scenario(file, [*(settings or ()), *given_by_options(None, seed)])
    if seed is not None:
        origins["seed"] = "--seed"
    plan = None if faults is None else _service_faults(faults, scenario, origins, log)
    with errors_at(origins):
        sinks = recording.sinks(lambda: {"scenario": with_its_table(live_scenario(scenario)).model_dump(mode="json")})
        body = SimulatedBody(
            scenario,
            speed=speed or 1.0,
            origins=origins,
            sinks=sinks,
            faults=plan,
            make_codec=make_codec,
            warn=log.tell,
        )
    for notice in body.simulation.notices:
        log.tell(f"note: {notice}")
    table = scenario.speculation.adaptive
    return body, table if isinstance(table, str) else None


def _service_faults(given: str, scenario: Scenario, origins: dict[str, str], log: ServerLog) -> FaultPlan:
    """Return the faults of the service in a plan;
    clients are those outside, which a note says where the plan has its own."""
    from ..simulation.simulate import fault_plan

    plan, left_out = fault_plan(given, scenario, origins).of_service()
    if left_out:
        log.tell(f"note: {', '.join(left_out)} left out: clients come from outside")
    return plan


def _faults_on_demand(
    by_header: bool, admin_port: int | None, log: ServerLog
) -> tuple[RequestFaults | None, Admin | None]:
    """Return the faults that clients or the admin port can ask for, and that port."""
    if not by_header and admin_port is None:
        return None, None
    from ...serve.base.connections import bind
    from ...serve.requests.faults import Admin, RequestFaults, admin_app

    faults = RequestFaults(by_header=by_header)
    if admin_port is None:
        return faults, None
    listener = bind("127.0.0.1", admin_port)
    log.tell(f"faults are asked for on http://127.0.0.1:{listener.getsockname()[1]}/faults")
    return faults, Admin(admin_app(faults), listener)


def _run(
    body: Body,
    limits: Limits,
    recording: Recording,
    table: Path | None,
    faults: RequestFaults | None,
    admin: Admin | None,
    *,
    log: ServerLog,
    access_log: bool,
    start_s: float,
    operations: ServeOperations,
    host: str,
    listener: socket,
    drain_s: float,
    stamp: bool,
    **of_app: Any,  # as `make_app` takes them
) -> None:
    from ...serve.answers.frontend import Frontend
    from ...serve.app import make_app
    from ...serve.server import HttpServer

    with operations.watch(body, host, log) as watching:
        frontend = Frontend(
            body, limits, recording.metrics, log.tell, stamps=stamp, flush=recording.flush, start_s=start_s,
            after_turn=watching.after_turn, on_end=watching.on_end,
        )  # fmt: skip
        if recording.folder is not None:
            log.tell(f"the decision log is in {recording.folder}")
        access = log.access if access_log else None
        app = make_app(
            frontend, access=access, faults=faults, engine_of_port=watching.engine_of_port,
            origins=operations.allowed_origins or (), **of_app,
        )  # fmt: skip
        app.state.reader.start()
        server = HttpServer(
            app, frontend, listeners=[listener, *watching.listeners], drain_s=drain_s, table=table, admin=admin,
            certificate=operations.certificate,
        )  # fmt: skip
        server.run()
        if not server.started:
            raise typer.Exit(1)
        if frontend.scheduler.error is not None:
            raise frontend.scheduler.error
    _tell_faults(body)


def _tell_faults(body: Body) -> None:
    """Print which faults a simulated server has injected; exit code 1 if a promise was broken."""
    report = getattr(body, "finish", lambda: None)()
    if report is None:
        return
    from ..simulation.run_record import EXIT_BROKEN, print_broken, print_faults

    print_faults(report)
    if not report.kept:
        print_broken(report, None)
        raise typer.Exit(EXIT_BROKEN)
