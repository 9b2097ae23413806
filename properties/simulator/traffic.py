"""Laws of what moves outside the engines: requests from clients over links and routers, KV over ports, and what
remains of all of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from math import ceil
from statistics import correlation, fmean, pstdev

from .answer import SimulatorAnswer
from .contract import BURST, Service, SimulatorConfig
from .ledger import SimulatedLife, SimulatorLedger

BYTES_PER_TOKEN = 4
SURE = 4.5
"""Standard deviations that a mean of draws may be off."""

SEVERAL = 200
"""Draws from which their distribution is looked at."""

ROUNDS_IN_FLIGHT = 3
"""The most that a request may still get after its engine knew that it ends."""

ALIKE_ROUNDS, ALIKE_REQUESTS = 8, 4
LINK_FAULTS = ("link.late", "link.lost", "link.duplicated")


class RunTraffic:
    """The traffic of one run. Each method yields what is wrong as (what was, what should be)."""

    def __init__(self, answer: SimulatorAnswer, ledger: SimulatorLedger, config: SimulatorConfig) -> None:
        self.answer = answer
        self.service: Service = answer.service
        self.ledger = ledger
        self.config = config
        self.kinds = {kind for kind, permille in self.service.faults or () if permille}
        self.links_work = self.kinds.isdisjoint(LINK_FAULTS)

    # -- what was asked for -------------------------------------------------------------------------------------------

    def wrong_load(self) -> Iterator[tuple[str, str]]:
        """Find what is wrong with the load: arrivals in order at the asked rate, lengths as asked for, no client
        with two requests."""
        service, arrivals = self.service, self.answer.arrivals
        for before, after in pairwise(arrivals):
            if after[0] < before[0]:
                yield f"a request arrives at {after[0]} ns, the one before it at {before[0]} ns", "arrivals in order"
        for _, prompt, output in arrivals:
            if prompt not in service.prompt_lens or output not in service.output_lens:
                yield f"a request of {prompt} and {output} tokens", "lengths that were asked for"
        if service.clients:
            yield from self._clients()
        else:
            yield from self._rate()
        if len(arrivals) >= SEVERAL:
            yield from self._lengths("prompt", [prompt for _, prompt, _ in arrivals], service.prompt_lens)
            yield from self._lengths("output", [output for _, _, output in arrivals], service.output_lens)
            yield from self._independence()

    def _rate(self) -> Iterator[tuple[str, str]]:
        service, times = self.service, [ns for ns, _, _ in self.answer.arrivals]
        gap_ns = 1e12 / service.rate_per_ks
        if service.arrivals == "even":
            late = next((i for i, ns in enumerate(times) if abs(ns - i * gap_ns) > 2), None)
            if late is not None:
                yield (
                    f"request {late} arrives at {times[late]} ns",
                    f"{late * gap_ns:.0f} ns: one every {gap_ns:.0f} ns",
                )
        elif len(times) >= SEVERAL:
            mean_ns = times[-1] / len(times)
            if abs(mean_ns / gap_ns - 1) > SURE / len(times) ** 0.5:
                yield f"{len(times)} Poisson arrivals are {mean_ns:.0f} ns apart", f"{gap_ns:.0f} ns on average"

    def _lengths(self, name: str, drawn: list[int], asked: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """Check that each length occurs as often as the others, in the mean."""
        mean, got = fmean(asked), fmean(drawn)
        if abs(got - mean) > SURE * pstdev(asked) / len(drawn) ** 0.5 + 1e-9:
            yield f"{len(drawn)} {name} lengths have a mean of {got:.2f}", f"{mean:.2f}: each length equally often"

    def _independence(self) -> Iterator[tuple[str, str]]:
        """Check that a request's two lengths come from two coins."""
        _, prompts, outputs = zip(*self.answer.arrivals, strict=True)
        if len(set(prompts)) > 1 and len(set(outputs)) > 1:
            n, together = len(prompts), correlation(prompts, outputs)
            if abs(together) > SURE / n**0.5:
                yield f"prompts and outputs of {n} requests correlate by {together:.2f}", "lengths drawn independently"

    def _clients(self) -> Iterator[tuple[str, str]]:
        most, moments = self.service.clients, []
        if self.service.has_leavers and not self.links_work:
            return  # a client may leave unheard
        for life in self.ledger.lives.values():
            leaves = life.end == "abort" or life.id in self.answer.books["patience"]
            heard_ns = self._most_ns_on_a_link if leaves else 0  # after the client has gone on to its next request
            if (self.links_work or not heard_ns) and self._is_own(life):
                moments += [(life.arrival_ns, 1), (max(life.arrival_ns, life.end_ns - heard_ns), -1)]
        now = 0
        for ns, change in sorted(moments, key=lambda moment: (moment[0], moment[1])):
            now += change
            if now > most:
                yield f"at {ns} ns there are {now} requests of {most} clients", "one request per client at a time"
                return
        if not self.service.has_leavers and self.kinds <= {BURST} and not self.service.chunk_us:
            yield from self._goes_on(most)

    def _goes_on(self, num_clients: int) -> Iterator[tuple[str, str]]:
        """Find a client that does not send its next request as soon as its last one has ended."""
        own = [life for life in (*self.ledger.lives.values(), *self.ledger.refused) if self._is_own(life)]
        own.sort(key=lambda life: int(life.id[1:]))
        ends_ns = sorted(life.end_ns for life in own)
        for life, end_ns in zip(own[num_clients:], ends_ns, strict=False):
            waited_ns = life.arrival_ns - end_ns
            if not 0 <= waited_ns <= self._most_ns_on_a_link:
                was = f"{life.id} comes {waited_ns} ns after a client's request has ended"
                yield was, f"0 … {self._most_ns_on_a_link} ns: the client waits for nothing but its own request"
                return

    @staticmethod
    def _is_own(life: SimulatedLife) -> bool:
        """Return whether a client waits for the request: it is no copy of a burst."""
        return "." not in life.id

    @cached_property
    def _most_ns_on_a_link(self) -> int:
        """The longest time that a message takes: behind all prompts of the run."""
        latency_ns, bytes_per_s = self.answer.books["link"]
        copies = max(1, len(self.ledger.lives) + len(self.ledger.refused))
        tokens = sum(prompt for _, prompt, _ in self.answer.arrivals) * (copies if BURST in self.kinds else 1)
        return latency_ns + int(tokens * BYTES_PER_TOKEN / bytes_per_s * 1e9)

    # -- links and routers --------------------------------------------------------------------------------------------

    def wrong_delivery(self) -> Iterator[tuple[str, str]]:
        """Find a message that arrives before its bytes can, alone or with those that were sent after it was, one that
        overtakes another one of its link, or a route against the policy."""
        if self.service.clients or not self.links_work or BURST in self.kinds:
            return
        latency_ns, bytes_per_s = self.answer.books["link"]
        lives = {life.id: life for life in (*self.ledger.lives.values(), *self.ledger.refused)}
        links: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        sent: list[tuple[int, SimulatedLife]] = []
        for number, (time_ns, prompt, _) in enumerate(self.answer.arrivals):
            life = lives.get(f"r{number}")
            if life is None:
                continue
            sent.append((time_ns, life))
            takes_ns = int(prompt * BYTES_PER_TOKEN / bytes_per_s * 1e9)
            links[life.replica].append((time_ns, life.arrival_ns - latency_ns, takes_ns))
        for replica, messages in links.items():
            yield from self._link(replica, messages)
        is_plain = not self.config.has_pools and not self.service.chunk_us  # else ends reach a router later
        if len(sent) == len(self.answer.arrivals) and is_plain and self.service.replicas > 1:
            yield from self._routes(sent)

    def _link(self, replica: int, messages: list[tuple[int, int, int]]) -> Iterator[tuple[str, str]]:
        """Check the messages of a link in the order in which they were sent: (sent, arrived without the latency, time
        of its bytes)."""
        for (_, before_ns, _), (_, after_ns, _) in pairwise(messages):
            if after_ns < before_ns:
                yield f"a request overtakes another one on the link to engine {replica}", "the order of sending"
                return
        for first, (begin_ns, _, _) in enumerate(messages):
            total_ns = 0
            for _, arrived_ns, takes_ns in messages[first:]:
                total_ns += takes_ns
                if arrived_ns - begin_ns < total_ns - 1:
                    was = f"{total_ns} ns of requests have passed the link to engine {replica} in {arrived_ns - begin_ns} ns"
                    yield was, "one request at a time on each link, and the latency"
                    return

    def wrong_leaving(self) -> Iterator[tuple[str, str]]:
        """Find a client that leaves and is not heard, or one whose request is given up before it leaves."""
        if self.service.faults is not None:
            return
        limit_ns = self.service.deadline_ms * 10**6
        for number, (time_ns, _, _) in enumerate(self.answer.arrivals):
            life, waits_ns = self.ledger.lives.get(f"r{number}"), self.answer.books["patience"].get(f"r{number}")
            if life is None:
                continue
            if limit_ns and (waits_ns is None or waits_ns > limit_ns):
                yield f"the client of {life.id} would wait for {waits_ns} ns", f"{limit_ns} ns at most"
            if life.end == "abort" and (waits_ns is None or life.end_ns < time_ns + waits_ns):
                yield f"{life.id} is given up at {life.end_ns} ns", "its client's leave, and no earlier"
            if waits_ns is not None:
                told_ns = life.arrival_ns + waits_ns + self._most_ns_on_a_link
                late = sum(ns > told_ns for ns, _ in life.emissions)
                if late > ROUNDS_IN_FLIGHT:
                    was = f"{life.id} goes on for {late} rounds when its client has left"
                    yield was, f"{ROUNDS_IN_FLIGHT} at most, of steps in flight"

    def _routes(self, sent: list[tuple[int, SimulatedLife]]) -> Iterator[tuple[str, str]]:
        replicas = range(self.service.replicas)
        if self.service.policy == "round_robin":
            for number, (_, life) in enumerate(sent):
                if life.replica != number % len(replicas):
                    yield f"request {number} goes to engine {life.replica}", f"{number % len(replicas)}, in turn"
            return
        if self.service.policy == "prefix_aware":
            yield from self._soonest(sent)
            return
        times: dict[int, list[int]] = {replica: [] for replica in replicas}
        for number, (time_ns, life) in enumerate(sent):
            # At one time ends may come before or after.
            least = {r: sum(end_ns > time_ns for end_ns in times[r]) for r in replicas}
            most = {r: sum(end_ns >= time_ns for end_ns in times[r]) for r in replicas}
            if least[life.replica] > min(most.values()):
                was = f"request {number} goes to engine {life.replica}, which has {least[life.replica]} requests"
                yield was, f"an engine with the fewest, {min(most.values())}"
                return
            times[life.replica].append(life.end_ns)

    def _soonest(self, sent: list[tuple[int, SimulatedLife]]) -> Iterator[tuple[str, str]]:
        """Find a request at an engine that knows less of its prompt than another one, which has no more to do, by
        what a router has seen: prompts, first tokens and ends."""
        replicas = range(self.service.replicas)
        known: list[dict[int, int]] = [{} for _ in replicas]
        routed: list[list[tuple[SimulatedLife, int]]] = [[] for _ in replicas]  # with the tokens that were missing
        for number, (time_ns, life) in enumerate(sent):
            missing = [life.prompt - _matched(life.segments, known[r]) for r in replicas]
            # At one time first tokens and ends may come before or after.
            least, most = ([_to_do(routed[r], at_ns) for r in replicas] for at_ns in (time_ns + 1, time_ns))
            mine = life.replica
            for other in replicas:
                if missing[other] < missing[mine] and all(map(int.__le__, most[other], least[mine])):
                    was = f"request {number} goes to engine {mine}, which misses {missing[mine]} tokens of its prompt"
                    yield was, f"engine {other}, which has no more to do and misses {missing[other]}"
                    return
            routed[mine].append((life, missing[mine]))
            for segment, tokens in life.segments:
                known[mine][segment] = max(tokens, known[mine].get(segment, 0))
            if sum(known[mine].values()) > self.service.pages * self.config.page_size:
                return  # it forgets some, as a cache does

    # -- ports --------------------------------------------------------------------------------------------------------

    def wrong_transfer(self) -> Iterator[tuple[str, str]]:
        """Find KV that arrives before its bytes can, alone or with all that pass the same port, or a byte that
        does not count once."""
        joined = [life for life in self.ledger.lives.values() if life.joined_ns >= 0 and life.emissions]
        if not self.config.has_pools or self.service.faults is not None or self.ledger.retractions:
            return
        latency_ns, bytes_per_s, page_bytes, beside = self.answer.books["port"]
        num_bytes, takes_ns = {}, {}
        for life in joined:
            # Pages that earlier chunks have filled leave before the first token is known.
            pages, before = ceil(life.prompt / self.config.page_size), life.prompt - life.last_chunk
            num_bytes[life.id] = pages * page_bytes
            takes_ns[life.id] = int((pages - before // self.config.page_size) * page_bytes / bytes_per_s * 1e9)
        for life in joined:
            # Layer by layer, KV leaves while the step computes the next layer, and all but the last one may be there.
            least_ns = 0 if self.config.layerwise else takes_ns[life.id]
            computed_ns = life.emissions[0][0]
            if life.joined_ns < computed_ns + least_ns + (0 if self.config.layerwise else latency_ns):
                was = f"the KV of {life.id} is there {life.joined_ns - computed_ns} ns after it was computed"
                yield was, f"at least {least_ns + latency_ns} ns: the time of its bytes, and the latency"
        if self.config.layerwise:
            return
        ports = {("out of", life.replica) for life in joined} | {("into", life.joined_at) for life in joined}
        for way, engine in sorted(ports):
            own = [life for life in joined if (life.replica if way == "out of" else life.joined_at) == engine]
            yield from self._port(f"{way} engine {engine}", own, takes_ns)
        summary = self.answer.books["summary"]
        is_whole = all(life.joined_ns >= 0 for life in self.ledger.lives.values()) and not summary["transfer_retries"]
        should = sum(num_bytes.values()) + beside * len(joined)
        was = summary["transferred_bytes"]
        if was != should and is_whole:
            yield f"{was} bytes were transferred", f"{should}: those of {len(joined)} prompts"

    def _port(self, name: str, lives: list[SimulatedLife], takes_ns: dict[str, int]) -> Iterator[tuple[str, str]]:
        lives = sorted(lives, key=lambda life: life.joined_ns)
        begins = sorted(life.emissions[0][0] for life in lives)
        for begin_ns in begins[bisect_left(begins, 0) : bisect_right(begins, self.ledger.last_ns)]:
            total_ns = 0
            for life in lives:
                if life.emissions[0][0] < begin_ns:
                    continue
                total_ns += takes_ns[life.id]
                if life.joined_ns - begin_ns < total_ns:
                    was = f"{total_ns} ns of KV have passed {name} within {life.joined_ns - begin_ns} ns"
                    yield was, "one transfer at a time on each port"
                    return

    def wrong_pools(self) -> Iterator[tuple[str, str]]:
        """Find a pool without an engine, an engine that is in none, or roles that change unasked or uncounted."""
        if not self.config.has_pools:
            return
        summary, pools = self.answer.books["summary"], self.config.pools
        now, changes = (summary["prefill_engines"], summary["decode_engines"]), summary["role_changes"]
        may_change = changes if self.config.rebalance_ms else 0
        if min(now) < 1 or sum(now) != sum(pools) or abs(now[0] - pools[0]) > may_change or changes > may_change:
            was = f"after {changes} changes of roles {now[0]} engines compute prompts, and {now[1]} decode"
            yield was, f"one of each at least, of {pools[0]} and {pools[1]}, each change counted"

    def wrong_batch(self) -> Iterator[tuple[str, str]]:
        """Find a step with more requests than its engine's batch has places."""
        places = self.service.max_running
        for step in self.ledger.steps:
            rows = {*(step.decode or ()), *(row for row, *_ in step.chunks)}
            if len(rows) > places:
                yield f"step {step.number} of engine {step.replica} has {len(rows)} requests", f"{places} at most"

    # -- acceptance, and what is left ---------------------------------------------------------------------------------

    def wrong_runs(self) -> Iterator[tuple[str, str]]:
        """Find a round that does not accept what the request's own stream has at its output position."""
        runs = self.answer.books["runs"]
        for life in self.ledger.lives.values():
            for position, steps, length in life.accepted:
                own = runs.get(life.id, ())
                if steps and position < len(own) and length != min(own[position], steps) + 1:
                    was = f"{life.id} accepts {length - 1} of {steps} drafts at its output position {position}"
                    yield was, f"{min(own[position], steps)}: its longest run there is {own[position]}"
                    return
        together: dict[str, list[list[tuple[int, int, int]]]] = defaultdict(list)
        for life in self.ledger.lives.values():
            together["the run"].append(life.accepted[:ALIKE_ROUNDS])
            together[f"the burst of {life.id.partition('.')[0]}"].append(life.accepted[:ALIKE_ROUNDS])
        for name, firsts in together.items():
            long = [rounds for rounds in firsts if len(rounds) == ALIKE_ROUNDS and rounds[0][1]]
            varies = bool(long) and len({length for _, _, length in long[0]}) > 1  # all drafts accepted may be chance
            if varies and len(long) >= ALIKE_REQUESTS and all(rounds == long[0] for rounds in long):
                was = f"{len(long)} requests of {name} accept the same in {ALIKE_ROUNDS} rounds"
                yield was, "each has a stream of its own"

    def _sent(self) -> dict[str, list[tuple[int, int]]]:
        """Return the chunks of each request as its client gets them: (time in ns, tokens)."""
        sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        unsent: Counter[tuple[int, str]] = Counter()
        free_ns: dict[int, int] = {}
        for got in self.ledger.got:
            at, chunks = (got.replica, got.id), sent[got.id]
            unsent[at] += got.tokens
            if unsent[at] >= self.service.stream_interval or got.is_last or not chunks:
                free_ns[got.replica] = max(free_ns.get(got.replica, 0), got.ns) + 1000 * self.service.chunk_us
                arrives_ns = max(free_ns[got.replica], chunks[-1][0] if chunks else 0)
                chunks.append((arrives_ns, unsent.pop(at)))
        return sent

    def wrong_rest(self) -> Iterator[tuple[str, str]]:
        """Find what is left after the drain, or a message, request or token that does not count once."""
        for name, amount in self.answer.books["left"].items():
            if amount:
                yield f"{name}: {amount} after the last request", "0"
        for life in self.ledger.lives.values():
            if not life.end:
                yield f"{life.id} has no end", "an end for each request"
        numbers = [request.number for request in self.answer.requests]
        for number in sorted(set(numbers)):
            if (number < 0 and BURST not in self.kinds) or (number >= 0 and numbers.count(number) > 1):
                name = "a request that was never sent" if number < 0 else f"request {number}"
                yield f"{name} has {numbers.count(number)} ends", "one end for each request that was sent"
        sent = self._sent()
        for request in self.answer.requests:
            life = self.ledger.lives.get(f"r{request.number}")
            if life is None or request.reason == "refused":
                continue
            if request.num_output != life.tokens:
                yield f"{life.id} has {request.num_output} tokens", f"{life.tokens}, each counted once"
            if request.emissions != tuple(sent[life.id]):
                yield f"{life.id} got (ns, tokens) {request.emissions}", f"{tuple(sent[life.id])}, by the log"


def _matched(segments: tuple[tuple[int, int], ...], known: Mapping[int, int]) -> int:
    """Return the tokens at the front of a prompt of segments that are known as a whole."""
    matched = 0
    for segment, tokens in segments:
        if known.get(segment, 0) < tokens:
            break
        matched += tokens
    return matched


def _to_do(routed: list[tuple[SimulatedLife, int]], time_ns: int) -> tuple[int, int]:
    """Return the requests of an engine that end at `time_ns` or later, and the tokens that they missed of those whose
    first token comes then."""
    there = [(life, missing) for life, missing in routed if life.end_ns >= time_ns]
    waiting = (missing for life, missing in there if not life.emissions or life.emissions[0][0] >= time_ns)
    return len(there), sum(waiting)
