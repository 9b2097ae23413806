"""The catalogue: every invariant's id, its one sentence, and when it is checked. Data only.

E after every operation · S at each scheduler step · T when a request ends · I idle, drained · R over a whole run · M metamorphic, two
runs compared.

Words: `S` draft steps of a round, `k` top-k, `nd` nodes of a verify tree (root included), `p` page size, `R` the reserve of a request;
*canary* is the shadow cell of a KV slot: (owner, position, token, hash of all tokens before it).
"""

from __future__ import annotations

CATALOGUE: dict[str, tuple[tuple[str, str, str], ...]] = {
    "KV allocators and the request table": (
        ("ALLOC-01", "free + held + cached + deferred == total pages (recount from scratch)", "E"),
        ("ALLOC-02", "free list has no duplicate; its counter == its length", "E"),
        (
            "ALLOC-03",
            "no page in the free set is referenced by any request table, tree node, transfer or in-flight step",
            "E",
        ),
        ("ALLOC-04", "ref(page) == number of holders recounted; never negative", "E"),
        ("ALLOC-05", "ref==0 if and only if page is free (or evictable-cached, as the contract declares)", "E"),
        (
            "ALLOC-06",
            "a page writable by one live request is in no other live table; sharing only for full, verified, "
            "read-only pages",
            "E",
        ),
        ("ALLOC-07", "0 <= committed <= allocated <= row width; allocated is page aligned", "E"),
        (
            "ALLOC-08",
            "pages held == ceil(allocated/page); exercised at n*page-1, n*page, n*page+1 and when one step "
            "crosses several pages",
            "E",
        ),
        (
            "ALLOC-09",
            "a failed allocation changes nothing (byte-equal state), incl. refs and locks taken while trying",
            "E",
        ),
        (
            "ALLOC-10",
            "freeing a page not held raises a typed error and changes nothing; free(list with duplicates) drops "
            "one reference",
            "E",
        ),
        ("ALLOC-11", "ids returned after eviction are in range, aligned, disjoint, not live", "E"),
        ("ALLOC-12", "reserved page/slot 0 (padding, null) is never allocated, freed, cached or counted", "E"),
        ("ALLOC-13", "same op history -> same ids (no set/dict order, no wall clock)", "R"),
        ("ALLOC-14", "can_allocate(n) true and no op between -> alloc(n) succeeds", "E"),
        ("ALLOC-15", "after drain and flush: free == total, no deferred, no locks, no slots", "I"),
        ("ALLOC-16", "alloc(0) == []; alloc(>total) fails at once; eviction loop ends when nothing is evictable", "E"),
    ),
    "Overlap, steps in flight, FutureMap": (
        (
            "RELAY-01",
            "a page in the write set of a launched step returns to the pool only after the newest such step is "
            "processed",
            "E",
        ),
        (
            "RELAY-02",
            "each relay cell, per owner epoch, has the trace (W R)* and then at most one unread W: no R R, no R "
            "before W",
            "E",
        ),
        ("RELAY-03", "a cell read carries (slot, generation); another generation -> error, never a value", "E"),
        (
            "RELAY-04",
            "output of a step for a request preempted/aborted since launch is dropped whole; counters never go below 0",
            "E",
        ),
        ("RELAY-05", "no placeholder (-1) token reaches an executor input", "E"),
        (
            "RELAY-06",
            "reserved capacity >= committed + (rounds in flight)·(S+1) + draft write-ahead, for every launched step",
            "E",
        ),
        (
            "RELAY-07",
            "steps in flight <= depth; completions FIFO per worker; each applied exactly once, duplicates refused",
            "E",
        ),
        ("RELAY-08", "two in-flight steps of one request only as far as the contract allows", "E"),
        ("RELAY-09", "pipeline depth 1 and 2 give the same tokens for the same requests and oracle", "M"),
    ),
    "Radix prefix cache": (
        (
            "RADIX-01",
            "match() returns a page-aligned prefix of the query and each page's per-token canary equals the "
            "query tokens",
            "E",
        ),
        ("RADIX-02", "locks >= 0; parent lock >= child lock; root always present", "E"),
        ("RADIX-03", "lock(handle) covers the node itself and every ancestor", "E"),
        ("RADIX-04", "a locked node is never evicted; a split keeps the lock on both halves", "E"),
        ("RADIX-05", "evictable + protected == tokens in tree", "E"),
        (
            "RADIX-06",
            "lock(node) == number of live holders recounted; all zero when idle, after abort, retract, failed admit",
            "E,I",
        ),
        ("RADIX-07", "child present -> parent present; links both ways; no empty node; no node without data", "E"),
        ("RADIX-08", "evictable set == recomputed leaves; eviction order == declared policy", "E"),
        (
            "RADIX-09",
            "only tokens both computed and verified are inserted: no draft, no half prefilled pages of an "
            "aborted request",
            "E",
        ),
        (
            "RADIX-10",
            "on duplicate insert the request table points to the canonical pages before its copies are freed",
            "E",
        ),
        ("RADIX-11", "different namespace (salt, LoRA, model, tenant) never shares; equal namespace does share", "M"),
        ("RADIX-12", "shared/owned boundary of a waiting request is refreshed at re-match", "E"),
        ("RADIX-13", "a full hit leaves >= 1 token to compute", "E"),
        ("RADIX-14", "evict(n) frees >= min(n, evictable), reports exactly what it freed, ends", "E"),
        ("RADIX-15", "after eviction the same key is a miss, also after the page is refilled with other content", "E"),
        ("RADIX-16", "cache on/off gives equal tokens", "M"),
    ),
    "Tree acceptance, sampling, compaction": (
        ("ACCEPT-01", "accepted nodes form one root path (parent links), no gaps", "E"),
        (
            "ACCEPT-02",
            "for a live row: 1 <= emitted <= correct drafts + 1 <= width of accept_index, and emitted <= reserved",
            "E",
        ),
        ("ACCEPT-03", "greedy: emitted sequence == target-only oracle, token for token, incl. first draft token", "T"),
        (
            "ACCEPT-04",
            "sampling: exact distribution on small vocab (TV/chi2 with precomputed bound and fixed seed set); a "
            "token with target p=0 is never emitted",
            "R",
        ),
        (
            "ACCEPT-05",
            "NaN/inf/all-masked draft row -> recover from the target row; never re-emit the token just rejected",
            "E",
        ),
        (
            "ACCEPT-06",
            "after compaction slot of position i holds token i for all layers/sidecars (per token, not per page)",
            "E",
        ),
        ("ACCEPT-07", "positions are 0..n-1, no hole, no repeat", "E"),
        ("ACCEPT-08", "allocated − committed < R + p after each processed step (R of the block in force)", "E"),
        ("ACCEPT-09", "draft ids in [0, vocab) or replaced/rejected before the target sees them", "E"),
        (
            "ACCEPT-10",
            "emission stops at the first stop/EOS inside the run; reason = stop even when the run also crosses "
            "max_tokens",
            "T",
        ),
        ("ACCEPT-11", "len(out) <= max_tokens and <= model_len - prompt; == max_tokens if no stop", "T"),
        (
            "ACCEPT-12",
            "usage == delivered tokens; accepted <= proposed; sum over steps == totals; per-position acceptance "
            "non-increasing in joint form",
            "T",
        ),
        ("ACCEPT-13", "all ranks take the same k, drafts and accept length in each step", "S"),
        (
            "ACCEPT-14",
            "draft tail after the first token that a constraint forbids is never accepted (checked on a toy "
            "token automaton)",
            "E",
        ),
        ("ACCEPT-15", "a round with S = 0 equals a plain decode step (tokens, pages, counters)", "M"),
        (
            "ACCEPT-16",
            "no out-of-bounds KV move: every move reads and writes only slots that its request owned at launch "
            "(slot 0, the shared sink, aside), inside the pool, no destination twice, every source read before "
            "it is overwritten",
            "E",
        ),
        (
            "ACCEPT-17",
            "STANDALONE hidden states are always None: an algorithm that needs none has None in every input, "
            "result, buffer, relay field and message; None never merges with an array; presence is uniform over "
            "the rows of a batch",
            "E",
        ),
        (
            "ACCEPT-18",
            "every flat buffer is indexed with its own row width, carried with the data, also when the live "
            "configuration has changed since",
            "E",
        ),
        (
            "ACCEPT-19",
            "a verify tree has the nd - 1 candidates of greatest cumulative score; no child counts as better than its parent",
            "E",
        ),
        ("ACCEPT-20", "a node attends to itself and its ancestors alone; a walk finds each child once, in order", "E"),
        (
            "ACCEPT-21",
            "a draft follows the k best of each step by cumulative probability, each behind its own path",
            "E",
        ),
        (
            "ACCEPT-22",
            "sampling parameters: temperature, then the k greatest, then the fewest greatest whose mass reaches p, "
            "normalised",
            "E",
        ),
        (
            "ACCEPT-23",
            "a coin is a function of (seed, request, position, use): the same whenever it is asked for, even, and no two "
            "keys share one",
            "E",
        ),
        (
            "ACCEPT-24",
            "simulated acceptance: a run is a function of (seed, request, position), whatever the window, batch or steps; "
            "a recorded one is replayed as it was",
            "E",
        ),
        (
            "ACCEPT-25",
            "simulated acceptance: depth, correlation, drift and stretches are those that were configured, within a "
            "bound known beforehand; each recording has its share",
            "R",
        ),
        ("ACCEPT-26", "simulated acceptance: another seed is another set of requests of the same kind", "M"),
    ),
    "Adaptive step controller": (
        (
            "STEPS-01",
            "S is a candidate of the routed range; drafts past the context limit stay in the row's reserve, are "
            "never emitted, and their positions are clamped",
            "S",
        ),
        (
            "STEPS-02",
            "NaN, inf, negative, > S, empty, huge observations never yield an invalid S or a non-finite state",
            "S",
        ),
        (
            "STEPS-03",
            "the decision is a pure function of the observation history: equal histories on two ranks give equal S",
            "S",
        ),
        (
            "STEPS-04",
            "S = 0 is not absorbing unless it is the only candidate: with good acceptance offered, S > 0 within "
            "a bounded number of steps (probe), and probes are bounded too",
            "R",
        ),
        (
            "STEPS-05",
            "constant input: no switch after settling; stationary input: switches bounded as in REQUIREMENTS A8",
            "R",
        ),
        (
            "STEPS-06",
            "monotone in the *modelled cost*: more acceptance never lowers S, higher marginal verify cost never "
            "raises it; not monotone in batch size alone (long contexts pay again)",
            "M",
        ),
        (
            "STEPS-07",
            "a change of S takes effect only at launch of a new step; steps in flight keep their own S, "
            "reservation and buffers",
            "E",
        ),
        (
            "STEPS-08",
            "regret of the `goodput` policy: throughput >= 0.97 × the best fixed S (0 included) per stationary phase",
            "R",
        ),
        ("STEPS-09", "invalid or half-written config leaves the running policy as it was", "E"),
        ("STEPS-10", "each verify result is counted once; idle/empty batches do not move the estimate", "S"),
        ("STEPS-11", "the captured (step, batch size) pairs are exactly those that routing can reach", "S"),
        (
            "STEPS-12",
            "a round finds the graph of its steps, nodes and padded size, built before; a failed build changes nothing",
            "E",
        ),
        ("STEPS-13", "feedback produced at another step count than the slot's current one is counted nowhere", "E"),
        (
            "STEPS-14",
            "by the rule of the moving average the steps are those that a slow reading of the rule gives",
            "S",
        ),
        ("STEPS-15", "what is reserved holds the draft tokens of the largest candidate of any range, and no more", "S"),
        (
            "STEPS-16",
            "expected accept lengths are 1 … S + 1, no less with more steps, and after a stationary stretch what it yielded",
            "E",
        ),
    ),
    "Request lifecycle and scheduling": (
        ("ENGINE-01", "submitted == queued + running + transferring + sum(terminal by reason)", "E"),
        ("ENGINE-02", "only listed transitions; terminal absorbs; exactly one terminal event, last in the stream", "E"),
        ("ENGINE-03", "delivered tokens are never changed, repeated or lost by preempt/retract/restart", "E"),
        ("ENGINE-04", "all per-token accumulators have the same length as out", "E"),
        ("ENGINE-05", "scheduled tokens <= budget, seqs <= limit, each request at most once per step", "S"),
        ("ENGINE-06", "a preempted request holds no page, lock, future, draft or placeholder", "E"),
        (
            "ENGINE-07",
            "work conserving: a fitting head and a free slot and no pending event -> a step is launched",
            "S",
        ),
        (
            "ENGINE-08",
            "a request that can never fit (prompt + 1 + lookahead, or max_tokens by policy) is refused at "
            "admission with the reason",
            "E",
        ),
        ("ENGINE-09", "bounded overtaking and bounded preemptions per request (ageing)", "R"),
        ("ENGINE-10", "preempt only a strictly lower priority; equal priority never ping-pongs", "S"),
        ("ENGINE-11", "each cycle emits, finishes, refuses, or waits on a named external event; no retract loop", "S"),
        ("ENGINE-12", "a second live request with the same id is refused; the first is unaffected", "E"),
        (
            "ENGINE-13",
            "abort at any point releases everything in bounded steps, is idempotent, delivers no later token",
            "E",
        ),
        ("ENGINE-14", "chunked prefill progress strictly grows and equals owned pages", "S"),
        (
            "ENGINE-15",
            "the scheduler never reads the true output length: max_tokens is a scenario value, the length is the "
            "executor's",
            "R",
        ),
        ("ENGINE-16", "declared order (FCFS within class) holds among equals", "S"),
        (
            "ENGINE-17",
            "a request's output depends on that request alone: not on batch mix, order, padding, chunking, page "
            "size, mode or its neighbours' fate",
            "M",
        ),
        (
            "ENGINE-18",
            "degenerate sizes are legal: empty batch, one row, all finishing in one round, S = 0, S = 1, k = 1, "
            "nd = 1, a full last page, the context limit",
            "E",
        ),
        ("ENGINE-19", "same history -> same decisions: two instances, compared operation for operation", "R"),
    ),
    "Prefill/decode disaggregation": (
        ("HANDOFF-01", "decode of a request starts only when verified bytes == expected for every page", "E"),
        (
            "HANDOFF-02",
            "a source or target page of a transfer is neither freed nor reused until ack, cancel-ack, or lease "
            "end plus fence",
            "E",
        ),
        ("HANDOFF-03", "every hold has a deadline; lost notice -> reclaimed in bounded time; late notice ignored", "R"),
        (
            "HANDOFF-04",
            "completion keyed by (request, attempt, generation) with full-width ids; duplicate or reordered "
            "notice has no effect",
            "E",
        ),
        ("HANDOFF-05", "started == completed + failed + cancelled + in flight", "E"),
        (
            "HANDOFF-06",
            "arrival <= prefill start <= prefill end <= transfer start <= transfer end <= decode start <= end",
            "T",
        ),
        ("HANDOFF-07", "target per-token canary == source, incl. draft KV/hidden-state sidecars", "E"),
        ("HANDOFF-08", "failure of either peer reaches the other as a terminal error in bounded time", "R"),
        ("HANDOFF-09", "received pages enter the prefix cache only after HANDOFF-01", "E"),
        ("HANDOFF-10", "pool roles respected; role change only when empty", "E"),
    ),
    "Simulator, determinism, metrics": (
        ("SIM-01", "same seed + version -> byte-identical event log (PYTHONHASHSEED varied, 2 processes)", "R"),
        ("SIM-02", "clock never goes back; no event in the past", "E"),
        ("SIM-03", "0 <= TTFT <= E2E; ITL >= 0; TTFT + sum(ITL) == E2E", "T"),
        ("SIM-04", "core fed a recorded real run yields the same commands (sim/real parity)", "M"),
        ("SIM-05", "run -> trace -> replay identical", "M"),
        ("SIM-06", "RNG streams are independent: one more request or fault kind does not shift others", "M"),
        (
            "SIM-07",
            "tokens == throughput x duration; percentiles monotone; goodput <= throughput; attainment in [0,1]",
            "R",
        ),
        ("SIM-08", "a fault plan with all probabilities 0 == no plan", "M"),
        ("SIM-09", "steady state: L = lambda W; M/M/1 and M/D/1 within tolerance", "R"),
        (
            "SIM-10",
            "more pages never gives fewer completions or more retractions; every exception is a named, stored case",
            "M",
        ),
        ("SIM-11", "impossible configuration is refused, never simulated", "E"),
        (
            "SIM-12",
            "a block of rounds equals its rounds committed one by one: tokens, decisions, committed lengths, "
            "counters (slot ids may differ)",
            "M",
        ),
        (
            "SIM-13",
            "every number of a report is that of its log, recomputed: latencies, rates, accept length, steps in use, shares",
            "R",
        ),
        (
            "SIM-14",
            "every round and transfer takes the time that host, bytes and operations say, and never less than its weights' bytes",
            "R",
        ),
        (
            "SIM-15",
            "arrivals, lengths, clients, routes and links are those asked for; each request has its own acceptance",
            "R",
        ),
        (
            "SIM-16",
            "after the drain loads, rows, slots, ports and gauges are 0; each request, message and token counts once",
            "R",
        ),
    ),
    "Block managers that match and allocate": (
        (
            "BLOCKS-01",
            "a match is whole pages, less than all of the text, and each slot of it holds the request's own text",
            "E",
        ),
        ("BLOCKS-02", "free + held pages, each once, == all pages (recount from scratch)", "E"),
        ("BLOCKS-03", "a page that a request writes is in no other table; what was computed stays as it was", "E"),
        ("BLOCKS-04", "what fits into the free pages is granted; a refusal changes nothing", "E"),
        ("BLOCKS-05", "what was released is found again as long as no page has been handed out", "E"),
        ("BLOCKS-06", "slots stand in whole pages, in the order of positions, one for each", "E"),
        ("BLOCKS-07", "a name that runs is not admitted, one that does not is not released; nothing changes", "E"),
    ),
}
"""Group -> (id, sentence, when)."""
