"""How a server is named, reached and watched: TLS, sockets, ports of replicas, KV events, spans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

from ..options import Decorator, in_panel, refuse_without_effect, with_options

if TYPE_CHECKING:
    from ...core.contract.request import FinishedRequest
    from ...serve.base.port import Body, TextCodec
    from ...serve.metrics.counts import Life
    from ...serve.telemetry.log_lines import ServerLog

operations_option: partial[Any] = in_panel("ServeOperations")

# fmt: off
Uds = Annotated[Path | None, operations_option("--uds",
    "Unix socket to listen on, instead of --host and --port.", "PATH")]
Certificate = Annotated[Path | None, operations_option("--ssl-certfile",
    "Certificate (PEM) of an HTTPS server.", "FILE")]
CertificateKey = Annotated[Path | None, operations_option("--ssl-keyfile",
    "Its private key (PEM). Default: in the file of the certificate.", "FILE")]
AllowedOrigins = Annotated[list[str] | None, operations_option("--allowed-origins",
    "Site whose pages may use the server (CORS), or *; repeatable.", "ORIGIN")]
ServedNames = Annotated[list[str] | None, operations_option("--served-model-name",
    "The model's name for clients; repeatable: answers and metrics have the first. Default: the name of the directory, or "
    "of the scenario's model.", "NAME")]
LoraModules = Annotated[list[str] | None, operations_option("--lora-modules",
    "With --simulate: name of an adapter that requests may ask for as their model; repeatable. A path behind it, as vLLM "
    "has it, is not read.", "NAME[=PATH]")]
TokenizerDir = Annotated[Path | None, operations_option("--tokenizer",
    "With --simulate: directory with the tokenizer of a model (extra gpu, no torch), whose token ids prompts, answers and "
    "KV events then have. Default: about four letters are a token.", "DIR")]
ToolCallShare = Annotated[float | None, operations_option("--tool-call-share",
    "With --simulate: share of the chats with tools and tool_choice auto that are answered with a call. Default: 0.",
    min=0, max=1)]
ReplicaPorts = Annotated[int | None, operations_option("--replica-ports",
    "With --simulate: first of the ports on which each replica is reached alone, past the router, with its own metrics; "
    "0 chooses free ones.", "PORT", min=0, max=65535)]
KvEvents = Annotated[str | None, operations_option("--kv-events",
    "Publish what enters and leaves the prefix caches, as vLLM does, over ZeroMQ; an engine's port is the given one plus "
    "its number.", "tcp://*:5557")]
KvEventsReplay = Annotated[str | None, operations_option("--kv-events-replay",
    "Address at which subscribers ask for batches that they have missed; ports as above.", "tcp://*:5657")]
KvEventsTopic = Annotated[str | None, operations_option("--kv-events-topic",
    "Topic of the KV events. Default: empty.", "TOPIC")]
OtlpTracesEndpoint = Annotated[str | None, operations_option("--otlp-traces-endpoint",
    "Send a span of each output to this collector, by OTLP over HTTP.", "URL")]
# fmt: on


def _operation_options(
    *,
    uds: Uds = None,
    ssl_certfile: Certificate = None,
    ssl_keyfile: CertificateKey = None,
    allowed_origins: AllowedOrigins = None,
    served_model_name: ServedNames = None,
    lora_modules: LoraModules = None,
    tokenizer: TokenizerDir = None,
    tool_call_share: ToolCallShare = None,
    replica_ports: ReplicaPorts = None,
    kv_events: KvEvents = None,
    kv_events_replay: KvEventsReplay = None,
    kv_events_topic: KvEventsTopic = None,
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
) -> None:
    """Declare the options."""


with_operations: Decorator = with_options("operations", _operation_options)


@dataclass(slots=True)
class Watching:
    """What runs beside a server, as `Frontend`, `Server` and `make_app` take it."""

    after_turn: Callable[[], None] = lambda: None
    on_end: Callable[[FinishedRequest, int, Life], None] | None = None
    listeners: list[socket] = field(default_factory=list)
    engine_of_port: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServeOperations:
    """The values of the options. Raises ConfigError for those that do not fit together."""

    uds: Path | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    allowed_origins: list[str] | None
    served_model_name: list[str] | None
    lora_modules: list[str] | None
    tokenizer: Path | None
    tool_call_share: float | None
    replica_ports: int | None
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str | None
    otlp_traces_endpoint: str | None

    def __post_init__(self) -> None:
        refuse_without_effect(
            ("--ssl-keyfile", self.ssl_keyfile is not None and self.ssl_certfile is None, "without --ssl-certfile"),
            ("--kv-events-replay", self.kv_events_replay is not None and self.kv_events is None, "without --kv-events"),
            ("--kv-events-topic", self.kv_events_topic is not None and self.kv_events is None, "without --kv-events"),
        )
        self._check_names()
        if self.certificate is not None:
            from ...serve.base.connections import check_certificate

            check_certificate(*self.certificate)

    def _check_names(self) -> None:
        """Raise ConfigError for a name that is empty, has control characters, or is there twice."""
        from ...core.errors import ConfigError

        served, adapters = self.served_model_name or [], list(self.names["adapters"])
        for option, names in (("--served-model-name", served), ("--lora-modules", adapters)):
            for name in names:
                if not name or not name.isprintable() or [*served, *adapters].count(name) > 1:
                    raise ConfigError.of("<arguments>", option, f"expected names that differ, found {name!r}")

    @property
    def of_simulations(self) -> dict[str, Any]:
        """The values of the options that a server with a checkpoint makes no use of."""
        return {name: getattr(self, name) for name in ("lora_modules", "tokenizer", "tool_call_share", "replica_ports")}

    def make_codec(self) -> Callable[[], TextCodec]:
        """Return what makes the tokenizer of a simulation."""
        from ...serve.bodies.filler import FillerTokenizer

        if self.tokenizer is None:
            return FillerTokenizer
        from ...gpu.session.text import Tokenizer

        return partial(Tokenizer.load, self.tokenizer)

    @property
    def names(self) -> dict[str, Any]:
        """The names of the model and of its adapters, as `make_app` takes them."""
        served = self.served_model_name or []
        adapters = tuple(module.partition("=")[0] for module in self.lora_modules or ())
        return {"model": served[0] if served else None, "aliases": tuple(served[1:]), "adapters": adapters}

    @property
    def certificate(self) -> tuple[Path, Path | None] | None:
        """The files of certificate and key."""
        return None if self.ssl_certfile is None else (self.ssl_certfile, self.ssl_keyfile)

    @contextlib.contextmanager
    def listen(self, host: str, port: int) -> Iterator[socket]:
        """Take the address of the server until the end of the block."""
        from ...serve.base.connections import bind, bind_path

        with bind(host, port) if self.uds is None else bind_path(self.uds) as listener:
            try:
                yield listener
            finally:
                if self.uds is not None:
                    self.uds.unlink(missing_ok=True)

    @contextlib.contextmanager
    def watch(self, body: Body, host: str, log: ServerLog) -> Iterator[Watching]:
        """Start what runs beside the server, and end it with the block. Raises ConfigError."""
        watching = Watching()
        with contextlib.ExitStack() as stack:
            if self.replica_ports is not None:
                self._take_ports(body, host, watching, log)
                for listener in watching.listeners:
                    stack.enter_context(listener)
            if self.kv_events is not None:
                from ...core.scheduler.engine import Engine
                from ...serve.telemetry.kv_events import KvPublisher

                _check_blocks(body)
                engines = [engine for engine in body.engines if isinstance(engine, Engine)]
                publisher = KvPublisher(engines, self.kv_events, self.kv_events_replay, self.kv_events_topic or "")
                stack.callback(publisher.close)
                watching.after_turn = publisher.publish
                log.tell(f"KV events are published on {', '.join(publisher.addresses)}")
            if self.otlp_traces_endpoint is not None:
                from ...serve.telemetry.spans import RequestSpans

                spans = RequestSpans.to_collector(self.otlp_traces_endpoint, body)
                stack.callback(spans.close)
                watching.on_end = spans.ended
            yield watching

    def _take_ports(self, body: Body, host: str, watching: Watching, log: ServerLog) -> None:
        from ...core.errors import ConfigError
        from ...core.scheduler.config import EngineRole
        from ...serve.base.connections import bind

        assert self.replica_ports is not None
        if any(engine.config.role is not EngineRole.BOTH for engine in body.engines):
            message = "an engine that only prefills, or only decodes, serves no request alone"
            raise ConfigError.of("<arguments>", "--replica-ports", message)
        for number in range(len(body.engines)):
            listener = bind(host, self.replica_ports + number if self.replica_ports else 0, "--replica-ports")
            port = listener.getsockname()[1]
            watching.listeners.append(listener)
            watching.engine_of_port[port] = number
            log.tell(f"replica {number} is reached alone on port {port}")


def _check_blocks(body: Body) -> None:
    """Raise ConfigError if the tokens in the caches are not those of clients."""
    from ...core.errors import ConfigError

    if getattr(body, "needs_blocks", False):
        message = "router.policy prefix_aware replaces tokens by hashes of blocks, which other programs do not know"
        raise ConfigError.of("<arguments>", "--kv-events", message)
