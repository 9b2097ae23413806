"""The catalogue: every invariant's id, its one sentence, and when it is checked.

E after every operation · S at each scheduler step · T when a request ends · I idle, drained · R over a whole run · M
metamorphic, two runs compared.

Words: `S` draft steps of a round, `k` top-k, `nd` nodes of a verify tree (root included), `p` page size, `R` the
reserve of a request; *canary* is the shadow cell of a KV slot: (owner, position, token, hash of all tokens before it).
"""

from __future__ import annotations

import re

TEXT = """
KV allocators and the request table:
    ALLOC-01 E: free + held + cached + deferred == total pages (recount from scratch)
    ALLOC-02 E: free list has no duplicate; its counter == its length
    ALLOC-03 E: no page in the free set is referenced by any request table, tree node, transfer or in-flight step
    ALLOC-04 E: ref(page) == number of holders recounted; never negative
    ALLOC-05 E: ref==0 if and only if page is free (or evictable-cached, as the contract declares)
    ALLOC-06 E: a page writable by one live request is in no other live table; sharing only for full, verified, read-only pages
    ALLOC-07 E: 0 <= committed <= allocated <= row width; allocated is page aligned
    ALLOC-08 E: pages held == ceil(allocated/page); exercised at n*page-1, n*page, n*page+1 and when one step crosses several pages
    ALLOC-09 E: a failed allocation changes nothing but the order of the free list, incl. refs and locks taken while trying
    ALLOC-10 E: freeing a page not held raises a typed error and changes nothing; free(list with duplicates) drops one reference
    ALLOC-11 E: ids returned after eviction are in range, aligned, disjoint, not live
    ALLOC-12 E: reserved page/slot 0 (padding, null) is never allocated, freed, cached or counted
    ALLOC-13 R: same op history -> same ids (no set/dict order, no wall clock)
    ALLOC-14 E: can_allocate(n) true and no op between -> alloc(n) succeeds
    ALLOC-15 I: after drain and flush: free == total, no deferred, no locks, no slots
    ALLOC-16 E: alloc(0) == []; alloc(>total) fails at once; eviction loop ends when nothing is evictable
    ALLOC-17 E: units of a group in use == those of rows (recount from scratch); they take as many whole pages of the pool as they
        fill together, none if they have a pool of their own
    ALLOC-18 E: a row has a unit for each page from that of the first position which a window sees up to its last, and its states,
        no more
    ALLOC-19 E: a unit of a group is in one row, and holds what this row wrote

Groups of layers with a window, or with states:
    GROUP-01 E: free units + units of rows and of the cache == all units (recount from scratch); those in use take as many whole
        pages of the pool as they fill together, none if they have a pool of their own
    GROUP-02 E: a row holds the units of every position that a step in flight, or the next one, may read in a window, up to its last
        page, and its states
    GROUP-03 E: a unit that a row may write is in no other row, and not in the cache; a cached unit is read by the rows that hold it
    GROUP-04 E: what a step reads of a group is of its row's own text: the units of its window, and the state from which it goes on

Overlap, steps in flight, FutureMap:
    RELAY-01 E: a page in the write set of a launched step returns to the pool only after the newest such step is processed
    RELAY-02 E: each relay cell, per owner epoch, has the trace (W R)* and then at most one unread W: no R R, no R before W
    RELAY-03 E: a cell read carries (slot, generation); another generation -> error, never a value
    RELAY-04 E: output of a step for a request preempted/aborted since launch is dropped whole; counters never go below 0
    RELAY-05 E: no placeholder (-1) token reaches an executor input
    RELAY-06 E: reserved capacity >= committed + (rounds in flight)·(S+1) + draft write-ahead, for every launched step
    RELAY-07 E: steps in flight <= depth; completions FIFO per worker; each applied exactly once, duplicates refused
    RELAY-08 E: two in-flight steps of one request only as far as the contract allows
    RELAY-09 M: pipeline depth 1 and 2 give the same tokens for the same requests and oracle

Radix prefix cache:
    RADIX-01 E: match() returns a page-aligned prefix of the query and each page's per-token canary equals the query tokens
    RADIX-02 E: locks >= 0; parent lock >= child lock; root always present
    RADIX-03 E: lock(handle) covers the node itself and every ancestor
    RADIX-04 E: a locked node is never evicted; a split keeps the lock on both halves
    RADIX-05 E: evictable + protected == tokens in tree
    RADIX-06 E,I: lock(node) == number of live holders recounted; all zero when idle, after abort, retract, failed admit
    RADIX-07 E: child present -> parent present; links both ways; no empty node; no node without data
    RADIX-08 E: evictable set == recomputed leaves; eviction order == declared policy
    RADIX-09 E: only tokens both computed and verified are inserted: no draft, no half prefilled pages of an aborted request
    RADIX-10 E: on duplicate insert the request table points to the canonical pages before its copies are freed
    RADIX-11 M: different namespace (salt, LoRA, model, tenant) never shares; equal namespace does share
    RADIX-12 E: shared/owned boundary of a waiting request is refreshed at re-match; draft KV of a hit looked at its next token
    RADIX-13 E: a full hit leaves >= 1 token to compute
    RADIX-14 E: evict(n) frees >= min(n, evictable), reports exactly what it freed, ends
    RADIX-15 E: after eviction the same key is a miss, also after the page is refilled with other content
    RADIX-16 M: cache on/off gives equal tokens
    RADIX-17 E: a request has of each group of layers what its next token reads, of its own text: the units of the window, a state
    RADIX-18 E: units in use == those of requests and of the cache (recount from scratch); they take as many whole pages as they fill
    RADIX-19 E: a cached unit holds what its page holds; no request writes to it; what a request writes is in no other
    RADIX-20 E: a request that ends with new pages leaves what a start behind them reads, or behind those it had found without a state

Tree acceptance, sampling, compaction:
    ACCEPT-01 E: accepted nodes form one root path (parent links), no gaps
    ACCEPT-02 E: for a live row: 1 <= emitted <= correct drafts + 1 <= width of accept_index, and emitted <= reserved
    ACCEPT-03 T: greedy: emitted sequence == target-only oracle, token for token, incl. first draft token
    ACCEPT-04 R: sampling: exact distribution on small vocab (TV/chi2 with precomputed bound and fixed seed set); a token with target
        p=0 is never emitted
    ACCEPT-05 E: NaN/inf/all-masked draft row -> recover from the target row; never re-emit the token just rejected
    ACCEPT-06 E: after compaction slot of position i holds token i for all layers/sidecars (per token, not per page)
    ACCEPT-07 E: positions are 0..n-1, no hole, no repeat
    ACCEPT-08 E: allocated − committed < R + p after each processed step (R of the block in force)
    ACCEPT-09 E: draft ids in [0, vocab) or replaced/rejected before the target sees them
    ACCEPT-10 T: emission stops at the first stop/EOS inside the run; reason = stop even when the run also crosses max_tokens
    ACCEPT-11 T: len(out) <= max_tokens and <= model_len - prompt; == max_tokens if no stop
    ACCEPT-12 T: usage == delivered tokens; accepted <= proposed; sum over steps == totals; per-position acceptance non-increasing in
        joint form
    ACCEPT-13 S: all ranks take the same k, drafts and accept length in each step
    ACCEPT-14 E: draft tail after the first token that a constraint forbids is never accepted (checked on a toy token automaton)
    ACCEPT-15 M: a round with S = 0 equals a plain decode step (tokens, pages, counters)
    ACCEPT-16 E: no out-of-bounds KV move: every move reads and writes only slots that its request owned at launch (slot 0, the shared
        sink, aside), inside the pool, no destination twice, every source read before it is overwritten
    ACCEPT-17 E: STANDALONE hidden states are always None: an algorithm that needs none has None in every input, result, buffer, relay
        field and message; None never merges with an array; presence is uniform over the rows of a batch
    ACCEPT-18 E: every flat buffer is indexed with its own row width, carried with the data, also when the live configuration has
        changed since
    ACCEPT-19 E: a verify tree has the nd - 1 candidates of greatest cumulative score; no child counts as better than its parent
    ACCEPT-20 E: a node attends to itself and its ancestors alone; a walk finds each child once, in order
    ACCEPT-21 E: a draft follows the k best of each step by cumulative probability, each behind its own path
    ACCEPT-22 E: sampling parameters: temperature, then the k greatest, then the fewest greatest whose mass reaches p, normalised
    ACCEPT-23 E: a coin is a function of (seed, request, position, use): the same whenever it is asked for, even, and no two keys share
        one

Adaptive step controller:
    STEPS-01 S: S is a candidate of the routed range; drafts past the context limit stay in the row's reserve, are never emitted, and
        their positions are clamped
    STEPS-02 S: NaN, inf, negative, > S, empty, huge observations never yield an invalid S or a non-finite state
    STEPS-03 S: the decision is a pure function of the observation history: equal histories on two ranks give equal S
    STEPS-04 R: S = 0 is not absorbing unless it is the only candidate: with good acceptance offered, S > 0 within a bounded number of
        steps (probe), and probes are bounded too
    STEPS-05 R: constant input: no switch after settling; stationary input: switches bounded as in REQUIREMENTS A8
    STEPS-06 M: monotone in the *modelled cost*: more acceptance never lowers S, higher marginal verify cost never raises it; not
        monotone in batch size alone (long contexts pay again)
    STEPS-07 E: a change of S takes effect only at launch of a new step; steps in flight keep their own S, reservation and buffers
    STEPS-08 R: regret of the `goodput` policy: throughput >= 0.97 × the best fixed S (0 included) per stationary phase
    STEPS-09 E: invalid or half-written config leaves the running policy as it was
    STEPS-10 S: each verify result is counted once; idle/empty batches do not move the estimate
    STEPS-11 S: the captured (step, batch size) pairs are exactly those that routing can reach
    STEPS-12 E: a round finds the graph of its steps, nodes and padded size, built before; a failed build changes nothing
    STEPS-13 E: feedback produced at another step count than the slot's current one is counted nowhere
    STEPS-14 S: by the rule of the moving average the steps are those that a slow reading of the rule gives
    STEPS-15 S: what is reserved holds the draft tokens of the largest candidate of any range, and no more
    STEPS-16 E: expected accept lengths are 1 … S + 1, no less with more steps, and after a stationary stretch what it yielded
    STEPS-17 M: the results of one interval give the same expectations in any order

Drafts of rows of unequal lengths:
    DRAFT-01 E: after a round in which a row verified its root alone, or a look-up's drafts, its draft holds all committed tokens:
        what it drafts next is what it drafts for the row's text
    DRAFT-02 E: a round with a budget verifies as many drafts as the budget has and its rows may, no fewer and no more
    DRAFT-03 E: no row verifies a node that the plan has not reserved for it, and each verifies its root
    DRAFT-04 E: the drafts that are verified are those of greatest survival; among equals the earlier position, then the earlier row
    DRAFT-05 E: the confidences of a row are those of its own drafts, never of an earlier round or of the request before it
    DRAFT-06 E: an engine that chooses the drafts of a round spends the budget of its step as far as the rows have drafts, no less
        and no more, and gives no row more than it has
    DRAFT-07 E: the drafts that an engine chooses are those of greatest survival; among equals the earlier position, then the earlier row
    DRAFT-08 S: the confidences by which a plan takes a request are those of its last committed round, never of the request before it
    DRAFT-09 S: a budget is the one of most expected tokens in the time of a round, by these confidences; a row without any counts
        as certain
    DRAFT-10 E: a row of which a confidence is no probability counts as certain, and is counted
    DRAFT-11 E: no more tokens of a row wait for its draft, behind rounds in which look-ups drafted, than one pass takes

Recurrent states:
    STATE-01 E: after a round a row's state is that of its accepted path: it has taken in each of its tokens once, in order, and
        nothing that was rejected
    STATE-02 E: after a prompt chunk a row's state is that of the prompt so far, from the empty state on: whatever its slot held
        before, and again after a retraction
    STATE-03 E: a step leaves the states of all rows that it does not run
    STATE-04 S: there is room for a state of each running request exactly if the model has recurrent layers

Request lifecycle and scheduling:
    ENGINE-01 E: submitted == queued + running + transferring + sum(terminal by reason)
    ENGINE-02 E: only listed transitions; terminal absorbs; exactly one terminal event, last in the stream
    ENGINE-03 E: delivered tokens are never changed, repeated or lost by preempt/retract/restart
    ENGINE-04 E: all per-token accumulators have the same length as out
    ENGINE-05 S: scheduled tokens <= budget, seqs <= limit, each request at most once per step
    ENGINE-06 E: a preempted request holds no page, lock, future, draft or placeholder
    ENGINE-07 S: work conserving: a fitting head and a free slot and no pending event -> a step is launched
    ENGINE-08 E: a request that can never fit (prompt + 1 + lookahead, or max_tokens by policy) is refused at admission with the reason
    ENGINE-09 R: bounded overtaking and bounded preemptions per request (ageing)
    ENGINE-10 S: preempt only a strictly lower priority; equal priority never ping-pongs
    ENGINE-11 S: each cycle emits, finishes, refuses, or waits on a named external event; no retract loop
    ENGINE-12 E: a second live request with the same id is refused; the first is unaffected
    ENGINE-13 E: abort at any point releases everything in bounded steps, is idempotent, delivers no later token
    ENGINE-14 S: chunked prefill progress strictly grows and equals owned pages
    ENGINE-15 R: the scheduler never reads the true output length: max_tokens is a scenario value, the length is the executor's
    ENGINE-16 S: declared order (FCFS within class) holds among equals
    ENGINE-17 M: a request's output depends on that request alone: not on batch mix, order, padding, chunking, page size, mode or its
        neighbours' fate
    ENGINE-18 E: degenerate sizes are legal: empty batch, one row, all finishing in one round, S = 0, S = 1, k = 1, nd = 1, a full last
        page, the context limit
    ENGINE-19 R: same history -> same decisions: two instances, compared operation for operation

Prefill/decode disaggregation:
    HANDOFF-01 E: decode of a request starts only when verified bytes == expected for every page
    HANDOFF-02 E: a source or target page of a transfer is neither freed nor reused until ack, cancel-ack, or lease end plus fence
    HANDOFF-03 R: every hold has a deadline; lost notice -> reclaimed in bounded time; late notice ignored
    HANDOFF-04 E: completion keyed by (request, attempt, generation) with full-width ids; duplicate or reordered notice has no effect
    HANDOFF-05 E: started == completed + failed + cancelled + in flight
    HANDOFF-06 T: arrival <= prefill start <= prefill end <= transfer start <= transfer end <= decode start <= end
    HANDOFF-07 E: target per-token canary == source, incl. draft KV/hidden-state sidecars
    HANDOFF-08 R: failure of either peer reaches the other as a terminal error in bounded time
    HANDOFF-09 E: received pages enter the prefix cache only after HANDOFF-01
    HANDOFF-10 E: pool roles respected; role change only when empty

Simulator, determinism, metrics:
    SIM-01 R: same seed + version -> byte-identical event log (PYTHONHASHSEED varied, 2 processes)
    SIM-02 E: clock never goes back; no event in the past
    SIM-03 T: 0 <= TTFT <= E2E; ITL >= 0; TTFT + sum(ITL) == E2E
    SIM-04 M: core fed a recorded real run yields the same commands (sim/real parity)
    SIM-05 M: run -> trace -> replay identical
    SIM-06 M: RNG streams are independent: one more request, fault kind or engine does not shift others
    SIM-07 R: tokens == throughput x duration; percentiles monotone; goodput <= throughput; attainment in [0,1]
    SIM-08 M: a fault plan with all probabilities 0 == no plan
    SIM-09 R: steady state: L = lambda W; M/M/1 and M/D/1 within tolerance
    SIM-10 M: more pages never gives fewer completions or more retractions; every exception is a named, stored case
    SIM-11 E: impossible configuration is refused, never simulated
    SIM-12 M: a multi-step equals its rounds committed one by one: tokens, decisions, committed lengths, counters (slot ids may
        differ)
    SIM-13 R: every number of a report is that of its log, recomputed: latencies, rates, accept length, steps in use, shares
    SIM-14 M: more work is never cheaper, more bandwidth never slower, a slower host delays each round by as much; no round or
        transfer is faster than its bytes, and what fluctuates does so by itself and not in the mean
    SIM-15 R: arrivals, lengths, clients, batches, routes and links are those asked for; each request has its own acceptance
    SIM-16 R: after the drain loads, rows, slots, ports and gauges are 0; each request, message and token counts once
    SIM-17 M: a service whose steps run several rounds gives each request the same tokens at the same times as round by round

Block managers that match and allocate:
    BLOCKS-01 E: a match is whole pages, less than all of the text, and each slot of it holds the request's own text
    BLOCKS-02 E: free + held pages, each once, == all pages (recount from scratch)
    BLOCKS-03 E: a page that a request writes is in no other table; what was computed stays as it was
    BLOCKS-04 E: what fits into the free pages is granted; a refusal changes nothing
    BLOCKS-05 E: what was released is found again as long as no page has been handed out
    BLOCKS-06 E: slots stand in whole pages, in the order of positions, one for each
    BLOCKS-07 E: a name that runs is not admitted, one that does not is not released; nothing changes
    BLOCKS-08 R: by its events exactly the pages that a match finds are cached, each with its text
    BLOCKS-09 R: of the cached pages that no request has, the one unused for longest is handed out first
"""


def _read(text: str) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """Return group -> (id, sentence, when) of each invariant."""
    found = {}
    for group, members in re.findall(r"^(\S.*):\n((?: .*\n)+)", text, re.MULTILINE):
        entries = re.findall(r"^    (\S+) (\S+): (.*\n(?: {8}.*\n)*)", members, re.MULTILINE)
        found[group] = tuple((id, " ".join(sentence.split()), when) for id, when, sentence in entries)
    return found


CATALOGUE = _read(TEXT)
"""Group -> (id, sentence, when)."""
