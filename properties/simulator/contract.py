"""The contract of a simulator: a whole small service goes in, and out come its history, its requests
and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices

MACHINES = ("dense", "sparse", "8-bit", "eager", "two devices", "free host")
"""A dense model; one with experts; 8-bit weights and KV; without captured graphs, its drafts driven by the host;
over two devices; a dense model whose host takes no time, so that a device is busy while its engine has a step."""

CHANGES = ("bandwidth", "host")
"""What a machine has more of with `machines`: bandwidth of its memory; time that its host takes before each round,
`HOST_DELAY_NS`."""

HOST_DELAY_NS = 1_000_000

TREE_NODES = 6

TEXTS = ("chat", "code", "math")
"""What the requests are about, by which acceptance differs."""

ACCEPTANCES = ("text", "independent", "smooth", "drifting", "stretches")
"""How the acceptance of a request goes along its output: as usual for its text; drawn anew at each position; much alike
at neighbouring ones; ever lower; or on one of two levels for a few tokens."""

FAULTS = (
    *("device.slow", "device.raises", "device.restarts", "link.late", "link.lost", "link.duplicated"),
    *("client.cancels", "client.token_limits", "client.stop_edge", "pool.denied", "pool.retraction"),
)
"""Kinds of faults that a simulator with `faults` knows.
The probability is per step (device, pool), message (link) or request (client)."""

BURST = "load.burst"
"""With `bursts`: a kind of fault by which a request comes several times at once. The copies of r3 are r3.1, r3.2, …,
each with draws of its own; a client waits for the first one only."""

BURST_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """What `make(config)` builds: a simulator of engines with these pages, this many draft steps and this pipeline.

    `steps` is fixed, so that the lengths of a request's verify runs follow from that request alone; 0 is plain
    decoding.
    """

    page_size: int = 1
    steps: int = 0
    overlap: bool = False
    # With `books`:
    machine: str = "dense"  # one of `MACHINES`
    topk: int = 1  # branches of a draft; with more than 1 it is a tree of `TREE_NODES` nodes
    adaptive: bool = False  # the steps change with the load, between 0 and `steps`
    pools: tuple[int, int] = (0, 0)  # engines that compute prompts, and that decode, instead of a service's replicas
    port_mbps: int = 400_000  # of each engine's port; 400 Gbit/s
    layerwise: bool = False  # KV leaves while the prompt is being computed, else after it
    text: str = "chat"  # one of `TEXTS`
    acceptance: str = "text"  # with `acceptance`: one of `ACCEPTANCES`
    rebalance_ms: int = 0  # with `rebalance`: so often an engine of the idler pool may change its role; 0: never

    def __post_init__(self) -> None:
        assert self.page_size >= 1 and self.steps >= 0 and self.machine in MACHINES and self.topk in (1, 2)
        assert self.text in TEXTS and self.acceptance in ACCEPTANCES
        assert self.port_mbps >= 1 and self.rebalance_ms >= 0 and (min(self.pools) >= 1 or self.pools == (0, 0))

    @property
    def has_pools(self) -> bool:
        return self.pools != (0, 0)

    @classmethod
    def draw(cls, choose: Choices, has: SimulatorCapabilities) -> SimulatorConfig:
        plain = choose((1, 4, 16)), choose((0, 1, 3, 5)), choose((False, True))
        if not has.books:
            return cls(*plain)
        machine, topk, adaptive = choose(MACHINES), choose((1, 1, 2)), choose((False, False, True))
        pools = choose(((0, 0), (0, 0), (0, 0), (1, 1), (2, 1), (1, 2)))
        port_mbps, layerwise, text = choose((400_000, 1000, 100)), choose((False, True)), choose(TEXTS)
        acceptance = choose(("text", *ACCEPTANCES)) if has.acceptance else "text"
        rebalance_ms = choose((0, 5, 20)) if has.rebalance and pools != (0, 0) else 0
        return cls(*plain, machine, topk, adaptive, pools, port_mbps, layerwise, text, acceptance, rebalance_ms)


@dataclass(frozen=True, slots=True)
class Service:
    """One service and its load. Values may be impossible, on purpose; then it must be refused."""

    seed: int = 1  # of every draw
    num_requests: int = 1
    arrivals: str = "even"  # the first at time 0; or "poisson"
    rate_per_ks: int = 20_000  # requests in a thousand seconds
    prompt_lens: tuple[int, ...] = (5,)  # every prompt has one of these lengths, each as likely as the others
    output_lens: tuple[int, ...] = (4,)  # likewise: tokens that a request emits unless it is cut short
    pages: int = 256  # of KV in each replica
    max_running: int = 4  # requests in a replica's batch
    replicas: int = 1  # engines behind the router
    slo_ttft_ms: int = 0  # with the capability `goodput`: the limit of a good request; 0: none
    slo_e2el_ms: int = 0  # likewise
    faults: tuple[tuple[str, int], ...] | None = None  # with `faults`: (kind, probability in permille); None: no plan
    # With `books`:
    policy: str = "least_loaded"  # of the router; or "round_robin"
    link_mbps: int = 10_000  # from the clients to each engine
    clients: int = 0  # so many clients, each with one request at a time; 0: requests come at their times
    cancels: int = 0  # permille of the requests whose client leaves within a few hundredths of a second
    deadline_ms: int = 0  # a client that waits as long leaves, too; 0: none does
    jitter: int = 0  # permille: the standard deviation of a step's device time over its mean, which is the time without
    # With `prefixes`: prompts of so many groups, as many of each, which begin with `prefix_len` common tokens, or with
    # all but their last token if they are shorter; `policy` may be "prefix_aware".
    prefix_groups: int = 0
    prefix_len: int = 0
    # With `chunks`: a client gets its first token alone, the others in chunks of at least so many, those of all rounds
    # since the last chunk. The last chunk comes with the last token.
    stream_interval: int = 1
    # Of the process that sends an engine's chunks one after the other, in the order of their last tokens: by rounds, in
    # a round first tokens before others, by rows
    chunk_us: int = 0

    @property
    def has_leavers(self) -> bool:
        """Whether clients may leave before their request has ended."""
        return bool(self.cancels or self.deadline_ms)


@dataclass(frozen=True, slots=True)
class SimulatorCapabilities(Capabilities):
    """What a simulator declares. Each flag adds methods or values, operations that use them, and invariants."""

    faults: bool = False  # Plans with the kinds of `FAULTS`
    traces: bool = False  # `replay(service, arrivals)`
    multi_steps: bool = False  # steps may run several rounds, and `round_by_round(service)` runs it with steps of one
    bursts: bool = False  # the kind `BURST` of faults
    parts: bool = False  # `in_parts(service)` runs each engine by itself
    books: bool = False  # events are lines of a log, and an answer has `books`
    # Prompts may share their beginnings, and the log has each as `segments`, (id, tokens). A prefix-aware router sends
    # no request to an engine that knows less of its prompt (by what was sent there before) than another one which has
    # no more requests and no more prompt tokens that wait.
    prefixes: bool = False
    machines: bool = False  # `changed(service, change)` runs it on a machine that has more of one of `CHANGES`
    rebalance: bool = False  # `rebalance_ms` may be set
    acceptance: bool = False  # `acceptance` may be set, and `books` have `asked`
    chunks: bool = False  # clients get output in chunks: `stream_interval` and `chunk_us` may be set
    notices: bool = False  # `books` have `lengths`
    goodput: bool = False  # `request_goodput` and `slo_attainment`, of all requests but the aborted, in the summary

    FOUNDATIONS: ClassVar = {
        "chunks": ("books",),
        "acceptance": ("books",),
        "prefixes": ("books",),
        "rebalance": ("books",),
        "bursts": ("faults", "books"),
        "parts": ("books",),
        "notices": ("books",),
        "machines": ("books",),
    }


class Simulator(Protocol):
    """A simulator. Runs share nothing. It refuses by returning None or by raising one of `REFUSALS`.

    A run is answered with a mapping:

      events      sequence of strings: the history, one line per event, in the order in which they happened
      times_ns    sequence of integers: the simulated time of each
      arrivals    sequence of [time in ns, prompt length, output length], as drawn; the number of a request is its place
                  here
      requests    sequence of mappings, one per request that reached a replica, also if that refused it:
                    number           its place in `arrivals`; −1 for one that a fault has added
                    reason           "completed", "refused", "aborted" or "failed"
                    arrival_ns       when it reached its replica
                    first_token_ns, finish_ns    as the simulator's own metrics have them; None where there is none
                    max_tokens       the most that it asked for
                    num_output       tokens that it got
                    retractions      how often it was retracted
                    emissions        sequence of [time in ns, tokens]: what it got, and when
      summary     mapping: completed, retractions, max_running, duration (s), total_output_tokens, output_throughput and
                  request_throughput (per s), mean_concurrency (requests in the system), mean_running (of these, in a
                  batch), mean_, median_, p90_, p95_ and p99_{ttft,tpot,itl,e2el}_ms of completed requests; None for
                  what is undefined

    With the capability `books` the events are the lines of a log (docs/simulate.md, `events.jsonl`), and an answer has
    one key more:

      books       mapping: summary   every number of the report by its name, as in summary.json
                           machine   of a device of an engine: `bytes_per_s` of its memory; `weights_bytes`, its share
                                     of the weights that every pass reads; `experts`, `experts_per_token` and
                                     `expert_bytes`, its share of one expert of all layers (0 without experts)
                           runs      mapping: id of a request -> per output position the longest run of drafts that
                                     verification would accept there, asked of the acceptance process alone
                           rounds    of the same process, with `steps` drafts a round: mappings id -> accept lengths,
                                     the bonus token included, of `count` successive rounds from the first output
                                     position on (`counted`), and of all that start before its end (`to_end`)
                           process   its `parameters`, the arguments of `simulator/acceptance.py: survival`; its
                                     `survival` of depth 1, 2, …; the `shares` of `num_draws` other requests whose
                                     longest run at the first output position is as deep
                           asked     with `acceptance`: the acceptance processes of the simulator, first that of the
                                     run, each as a mapping: `law`, arguments of `simulator/acceptance.py: shares_at`;
                                     `windows`, which were asked for in one call, each (first output position, longest
                                     runs from there on, the same asked for one at a time); `counts`, each (output
                                     position, of `num_draws` requests how many have the longest run 0, 1, 2, … there)
                           lengths   with `notices`: mapping "input" and "output" -> mean and standard deviation of the
                                     lengths asked for, and whether the report says that the mean of the completed
                                     requests is another one: it does if that is more than 5 % and more than 4 standard
                                     errors off
                           patience  mapping: id of a request -> after how many ns its client leaves, of those whose
                                     client does
                           link      [latency in ns, bytes per s] from the clients to each engine
                           port      [latency in ns, bytes per s, bytes of a page, bytes beside the last page] between
                                     engines
                           left      mapping: name -> what is left of it after the last request: loads, rows, slots,
                                     clients, gauges
    """

    def run(self, service: Service) -> Mapping[str, object] | None:
        """Simulate the service until its last request has ended."""

    @needs("traces")
    def replay(self, service: Service, arrivals: Sequence[Sequence[int]]) -> Mapping[str, object] | None:
        """Simulate it with these requests, as an answer's `arrivals` has them, written to a trace and read back."""

    @needs("multi_steps")
    def round_by_round(self, service: Service) -> Mapping[str, object] | None:
        """Simulate it with steps of one round each."""

    @needs("machines")
    def changed(self, service: Service, change: str) -> Mapping[str, object] | None:
        """Simulate it on a machine that has more of one of `CHANGES`."""

    @needs("parts")
    def in_parts(self, service: Service) -> Sequence[Mapping[str, object]] | None:
        """Simulate each engine of the service by itself, with the requests that it gets in turn, and return all
        `requests`, as an answer has them."""
