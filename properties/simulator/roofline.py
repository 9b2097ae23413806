"""The time of a step on a device, computed the slow way from the numbers of hardware and model: what SIM-14 compares
with.

Every pass is added up from the bytes that it moves and the operations that it does. `Clockwork` says when every round
must end. `machine` is the mapping `machine` of an answer (see `contract.py`); its models are mappings of sizes, its
times nanoseconds.

    decode     S − 1 draft passes · tree · verify · drafts from the host · sampling and KV move · catch-up
    prefill    the same draft passes without graphs · one target pass over chunks and nodes · sampling twice · one draft
               pass over both
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from math import ceil
from typing import Any, NamedTuple

from .ledger import SimulatorLedger, StepDone

TILES = ((16, 128, 0.35), (32, 128, 0.55), (64, 128, 0.80), (128, 128, 1.0), (128, 256, 1.0))
QUERY_TILES = (16, 64, 128)
ALIGNED_ABOVE, ALIGNED_TO = 512, 16


class Decode(NamedTuple):
    """A decode round: requests, draft steps, branches, nodes of a verify tree, KV tokens over the
    batch at its start."""

    batch: int
    steps: int
    topk: int
    nodes: int
    kv: int


class Model:
    """One model on one of `tp` devices. `sizes` is its mapping; `qkv_inputs` hidden vectors go into its attention."""

    def __init__(self, machine: Mapping[str, Any], sizes: Mapping[str, Any], qkv_inputs: int = 1) -> None:
        self.__dict__.update(sizes)
        self.machine = machine
        self.qkv_inputs = qkv_inputs
        self.tp = machine["tp"]
        self.local_heads = self.heads // self.tp
        self.local_kv_heads = max(self.kv_heads // self.tp, 1)
        # Rounds repeat the same shapes: what depends on a shape alone is added up once.
        self.body, self.head, self.kv_token = cache(self.body), cache(self.head), cache(self.kv_token)
        self.product, self.prompt_attention = cache(self.product), cache(self.prompt_attention)
        self.sparse = self.layers - self.dense_layers if self.experts else 0

    # -- one kernel ---------------------------------------------------------------------------------------------------

    def stream(self, num_bytes: float, share: str = "bandwidth") -> float:
        return num_bytes * 1e9 / (self.machine["bytes_per_s"] * self.machine[share])

    def corner(self, memory_ns: float, compute_ns: float) -> float:
        p = self.machine["soft_exponent"]
        most = max(memory_ns, compute_ns)
        return most * ((memory_ns / most) ** p + (compute_ns / most) ** p) ** (1 / p) if most else 0.0

    def product(self, rows: int, inner: int, columns: int, groups: float = 1.0, weight_bytes: int = 0) -> float:
        """Return the time of `groups` matrix products of `rows` tokens each, with their own weights, in
        tiles and waves."""
        machine = self.machine
        width = weight_bytes or self.weight_bytes
        rate = machine["flops"]["bf16" if weight_bytes or self.dtype not in machine["flops"] else self.dtype]
        per_sm = rate * machine["compute"] / machine["sm_count"]
        times = []
        for tile_rows, tile_columns, quality in TILES:
            tiles = ceil(groups * ceil(rows / tile_rows) * ceil(columns / tile_columns))
            one_s = 2 * tile_rows * tile_columns * inner / (per_sm * quality)
            times += [ceil(tiles * split / machine["sm_count"]) * one_s / split for split in (1, 2, 4, 8)]
        num_bytes = groups * (inner * columns * width + 2 * rows * (inner + columns))
        return machine["ramp_ns"] + self.corner(self.stream(num_bytes), min(times) * 1e9)

    # -- the parts of a pass ------------------------------------------------------------------------------------------

    def body(self, tokens: int, routed: tuple[int, float]) -> float:
        """Return the time of all layers without attention and communication, and of the embedding.
        `routed`: see `Roofline.routed`."""
        machine = self.machine
        if tokens > ALIGNED_ABOVE:
            tokens, *routed = (ceil(amount / ALIGNED_TO) * ALIGNED_TO for amount in (tokens, *routed))
        heads = self.local_heads + 2 * self.local_kv_heads
        attention = self.product(tokens, self.hidden * self.qkv_inputs, heads * self.head_dim)
        attention += self.product(tokens, self.local_heads * self.head_dim, self.hidden)
        wide = self.experts_per_token * self.moe_intermediate if self.sparse else self.intermediate
        moved = 2 * tokens * (8 * self.hidden + 2 * heads * self.head_dim + 3 * ceil(wide / self.tp))
        small = (5 if self.qk_norm else 4) * machine["small_kernel_ns"] + self.stream(moved)
        total = self.layers * (attention + small) + machine["ramp_ns"] + self.stream(4 * tokens * self.hidden)
        total += (self.layers - self.sparse) * self.mlp(tokens, self.intermediate) if self.sparse < self.layers else 0
        return total + (self.sparse * self.mixture(tokens, *routed) if self.sparse else 0)

    def mlp(self, tokens: int, width: int) -> float:
        local = ceil(width / self.tp)
        return self.product(tokens, self.hidden, 2 * local) + self.product(tokens, local, self.hidden)

    def experts_read(self, routed: float) -> float:
        """Return how many experts of a layer so many tokens reach, each with `experts_per_token` that
        are chosen evenly."""
        whole, part = divmod(routed, 1)
        stays = 1 - self.experts_per_token / self.experts
        missed = stays**part
        for _ in range(int(whole)):
            missed *= stays
        return self.experts * (1 - missed)

    def mixture(self, tokens: int, own: int, routed: float) -> float:
        reached, local = self.experts_read(routed), ceil(self.moe_intermediate / self.tp)
        each = ceil(own * self.experts_per_token / reached - 1e-6)
        total = self.product(each, self.hidden, 2 * local, reached) + self.product(each, local, self.hidden, reached)
        total += self.product(tokens, self.hidden, self.experts) + 3 * self.machine["small_kernel_ns"]
        return total + (self.mlp(tokens, self.shared_intermediate) if self.shared_intermediate else 0)

    def head(self, rows: int) -> float:
        """Return the time of the logits of so many tokens; 16 bits in every model."""
        machine = self.machine
        total = self.product(rows, self.hidden, ceil(self.vocab / self.tp), weight_bytes=2) + machine["small_kernel_ns"]
        return total + (self.exchange(rows * self.vocab * 2) if self.tp > 1 else 0)

    def exchange(self, num_bytes: float, ways: int = 1) -> float:
        machine = self.machine
        passing = ways * (self.tp - 1) / self.tp * num_bytes
        return machine["link_latency_ns"] + passing * 1e9 / machine["link_bytes_per_s"]

    def reductions(self, tokens: int) -> float:
        """Return the time of two all-reduces per layer, where there is more than one device."""
        return 2 * self.layers * self.exchange(2 * tokens * self.hidden, 2) if self.tp > 1 else 0.0

    def kv_token(self, queries: int) -> float:
        """Return the time to read one token's KV in one layer, for so many queries of a sequence."""
        rows = queries * (self.local_heads // self.local_kv_heads)
        tile = next((tile for tile in QUERY_TILES if rows <= tile), ceil(rows / 128) * 128)
        num_bytes = 2 * self.local_kv_heads * self.head_dim * self.kv_bytes
        flops = 4 * tile * self.head_dim * self.local_kv_heads
        rate = self.machine["flops"]["bf16"] * self.machine["attention_compute"]
        return self.corner(self.stream(num_bytes, "attention_bandwidth"), flops * 1e9 / rate)

    def attention(self, queries: int, own: int, kv: int, window: int, reads: int = 1) -> float:
        """Decode attention over `kv` tokens of a batch and `own` ones of this round;
        windowed layers read `window` at most."""
        one = reads * self.kv_token(queries)
        full = self.layers - self.windowed_layers
        read = self.layers * own + full * kv + self.windowed_layers * min(kv, window)
        return 2 * self.layers * self.machine["small_kernel_ns"] + one * read

    def prompt_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of attention in prompt chunks (new tokens, tokens before them):
        each looks at all before it, and at itself."""
        machine, pairs, tiles, read = self.machine, 0.0, 0, 0
        for new, past in chunks:
            pairs += (self.layers - self.windowed_layers) * sum(past + i + 1 for i in range(new))
            if self.windowed_layers:
                pairs += self.windowed_layers * sum(min(past + i + 1, self.attention_window) for i in range(new))
            tiles += ceil(new / 128) * self.local_heads
            read += new + past
        if not tiles:
            return 0.0
        filled = tiles / (ceil(tiles / machine["sm_count"]) * machine["sm_count"])
        rate = machine["flops"]["bf16"] * machine["attention_compute"] * filled
        num_bytes = self.layers * read * 2 * self.local_kv_heads * self.head_dim * self.kv_bytes
        compute_ns = 4 * self.local_heads * self.head_dim * pairs * 1e9 / rate
        return self.layers * machine["small_kernel_ns"] + self.corner(
            self.stream(num_bytes, "attention_bandwidth"), compute_ns
        )

    def dispatch(self, eager: bool) -> float:
        """Return the least time of a pass whose kernels the host launches one by one."""
        kernels = self.layers * (4 + (5 if self.qk_norm else 4) + 2 + (2 if self.tp > 1 else 0)) + 4 * self.sparse + 3
        return kernels * self.machine["eager_kernel_ns"] if eager else 0.0

    @cached_property
    def least_ns(self) -> float:
        """The time in which the weights that one token needs pass once at full bandwidth: no pass is faster."""
        layer = self.hidden * (self.local_heads * 2 + self.local_kv_heads * 2) * self.head_dim
        dense = 3 * self.hidden * (self.intermediate // self.tp)
        sparse = 3 * self.hidden * (self.moe_intermediate // self.tp) * self.experts_per_token
        weights = self.layers * layer + (self.layers - self.sparse) * dense + self.sparse * sparse
        num_bytes = weights * self.weight_bytes + 2 * self.hidden * (self.vocab // self.tp)
        return num_bytes * 1e9 / self.machine["bytes_per_s"]


class Roofline:
    """The device of `machine`."""

    def __init__(self, machine: Mapping[str, Any]) -> None:
        self.machine = machine
        self.target = Model(machine, machine["target"])
        self.draft = machine["draft"]
        body = self.draft and self.draft["body"]
        self.drafter = Model(machine, body, self.draft["qkv_inputs"]) if body else None

    def step_ns(self, chunks: Sequence[tuple[int, int]], decode: Decode | None) -> float:
        """Return the time of a step with these prompt chunks (new tokens, tokens before them) and this decode round."""
        if not chunks:
            return self.decode_ns(decode)
        return self.mixed_ns(tuple(chunks), decode or Decode(0, 0, 1, 1, 0))

    def routed(self, lens: Sequence[int], has_padding: bool) -> tuple[int, float]:
        """Return how many tokens requests have, and as how many independent ones they choose experts;
        padding is one token more."""
        share = self.machine["expert_independence"]
        return sum(lens), sum(1 + share * (length - 1) for length in lens) + share * has_padding

    def padded(self, batch: int, width: int) -> tuple[int, bool]:
        """Return the tokens of a pass with `width` per row as a captured graph runs them, and whether no graph
        is large enough."""
        by_rows = self.machine["graph_unit"] == "rows"
        size = next((s for s in self.machine["graph_sizes"] or () if s >= (batch if by_rows else batch * width)), None)
        if size is None:
            return batch * width, True
        return size * (width if by_rows else 1), False

    def decode_ns(self, d: Decode) -> float:
        """Return the time of one draft-and-verify round."""
        tokens, eager = self.padded(d.batch, d.nodes)
        routed = self.routed([d.nodes] * d.batch, tokens > d.batch * d.nodes)
        verify, host = self.verify(d, tokens, routed, tokens, (), eager)
        total = self.drafting(d, *self.padded(d.batch, d.topk)) + max(verify, self.target.dispatch(eager)) + host
        total += self.sampling(tokens) + self.kv_move(d, -(-tokens // d.nodes))
        if self.drafter is not None and (d.steps or self.machine["keep_draft_warm"]):
            repeat = max(d.steps, 1) if self.draft["algorithm"] == "MULTI_LAYER_EAGLE" else 1
            tokens, eager = self.padded(d.batch, d.steps + 1)
            rows, has_padding = -(-tokens // (d.steps + 1)), tokens > d.batch * (d.steps + 1)
            routed = self.routed([d.steps + 1] * d.batch, has_padding)
            total += repeat * self.draft_pass(d, tokens, routed, rows, self.caught_up(d), eager)
        return total

    def mixed_ns(self, chunks: Sequence[tuple[int, int]], d: Decode) -> float:
        """Return the time of a step with prompt chunks: everything together, without graphs."""
        new = sum(length for length, _ in chunks)
        lens = [length for length, _ in chunks]
        routed = self.routed([*lens, *[d.nodes] * d.batch], False)
        verify, host = self.verify(d, new + d.batch * d.nodes, routed, len(chunks) + d.batch * d.nodes, chunks, True)
        total = max(verify, self.target.dispatch(True)) + host + self.sampling(len(chunks))
        if d.batch:
            total += (
                self.drafting(d, d.batch * d.topk, True) + self.sampling(d.batch * d.nodes) + self.kv_move(d, d.batch)
            )
        if self.drafter is None:
            return total
        follows = d.batch if d.steps or self.machine["keep_draft_warm"] else 0
        attention = self.caught_up(d) if follows else 0.0
        attention += self.drafter.prompt_attention(chunks)
        tokens, routed = new + follows * (d.steps + 1), self.routed([*lens, *[d.steps + 1] * follows], False)
        return total + self.draft["heads"] * self.draft_pass(d, tokens, routed, len(chunks) + follows, attention, True)

    def verify(
        self,
        d: Decode,
        tokens: int,
        routed: tuple[int, float],
        logits: int,
        chunks: Sequence[tuple[int, int]],
        eager: bool,
    ):
        """Add the target's pass, and what proposing on the host takes as a share of it."""
        target, window = self.target, d.batch * (self.target.attention_window or 0)
        total = (
            target.body(tokens, routed) + target.head(logits) + self.machine["graph_gap_ns"] + target.reductions(tokens)
        )
        total += target.prompt_attention(chunks)
        if d.batch:
            total += target.attention(d.nodes, d.batch * d.nodes, d.kv, window)
        share = self.draft["verify_share"] if self.draft and d.steps else 0.0
        return total, share * total

    def drafting(self, d: Decode, tokens: int, eager: bool) -> float:
        """Return the time of the draft passes before the verify; the first drafts come from the last catch-up."""
        if self.drafter is None or not d.steps:
            return 0.0
        total = (d.steps + 5) * self.machine["small_kernel_ns"] if d.topk > 1 else 0.0
        if self.draft["algorithm"] == "MULTI_LAYER_EAGLE":
            return total
        own, window = d.batch * d.steps // 2, d.batch * (self.drafter.attention_window or 0)
        attention = self.drafter.attention(1, own, d.kv, window, d.topk)
        routed = self.routed([d.topk] * d.batch, tokens > d.batch * d.topk)
        for _ in range(d.steps - 1):
            total += self.draft_pass(d, tokens, routed, tokens, attention, eager, is_first=False)
        return total

    def caught_up(self, d: Decode) -> float:
        window = d.batch * (self.drafter.attention_window or 0)
        return self.drafter.attention(d.steps + 1, d.batch * (d.steps + 1), d.kv, window)

    def draft_pass(
        self,
        d: Decode,
        tokens: int,
        routed: tuple[int, float],
        logits: int,
        attention: float,
        eager: bool,
        is_first: bool = True,
    ) -> float:
        draft, drafter, machine = self.draft, self.drafter, self.machine
        total = drafter.body(tokens, routed) + attention + drafter.head(logits) + drafter.reductions(tokens)
        if draft["fusion_inputs"] and (is_first or draft["fusion_every_pass"]):
            inputs = draft["fusion_inputs"] * drafter.hidden
            total += drafter.product(tokens, inputs, -(-drafter.hidden // drafter.tp))
        total += machine["ramp_ns"] + drafter.stream(10 * logits * drafter.vocab) + machine["small_kernel_ns"]
        total += machine["graph_gap_ns"] if is_first else 0
        return max(total, drafter.dispatch(eager), machine["draft_floor_ns"])

    def sampling(self, rows: int) -> float:
        """Return the time of softmax, truncation, acceptance:
        18 bytes per logit in one stream, and seven small kernels."""
        machine = self.machine
        return machine["ramp_ns"] + self.target.stream(18 * rows * self.target.vocab) + 7 * machine["small_kernel_ns"]

    def kv_move(self, d: Decode, rows: int) -> float:
        """Return the time in which the accepted path of a tree becomes contiguous:
        one read and one write of its keys and values."""
        if d.topk == 1 or not d.steps:
            return 0.0
        target, machine = self.target, self.machine
        token = 2 * target.local_kv_heads * target.head_dim * target.kv_bytes * target.layers
        return machine["ramp_ns"] + target.stream(2 * rows * (d.steps + 1) * token) + machine["small_kernel_ns"]


NEAR_NS = 3
"""How far one round may be off: times are rounded down to nanoseconds, and sums of passes to fractions of them."""

NEAR = 1e-6


class Late(NamedTuple):
    """A round that ended at another time than it must."""

    step: StepDone
    number: int
    should_ns: float


class Clockwork:
    """The replicas of one run. Per replica: `busy_ns`, the least work of its device, and `lost_ns`, what it may have
    done beside that in steps that failed. `spread_ns`: the root of the summed squares of its rounds' times. `factors`:
    of each round its time over that of the roofline; None where the device did not keep the host waiting."""

    def __init__(self, ledger: SimulatorLedger, roofline: Roofline) -> None:
        self.busy_ns: dict[int, float] = {}
        self.lost_ns: dict[int, float] = {}
        self.spread_ns: dict[int, float] = {}
        self.factors: dict[int, list[float | None]] = {}
        self.roofline = roofline
        self.host: Mapping[str, Any] = roofline.machine["host"]
        self.late: Late | None = None
        self.too_fast: Late | None = None
        for replica in ledger.moments:
            self._follow(replica, ledger.moments[replica])

    def plan_ns(self, step: StepDone) -> int:
        host, rows = self.host, len(step.chunks) + len(step.decode or ())
        base = host["plan_base_ns"] + host["launch_base_ns"] + host["sampling_base_ns"]
        return base + (host["plan_row_ns"] + host["launch_row_ns"] + host["sampling_row_ns"]) * rows

    def commit_ns(self, step: StepDone, number: int) -> int:
        """Return the time to take the results of one of its rounds."""
        host = self.host
        tokens_ns = (host["commit_token_ns"] + host["detokenise_token_ns"]) * step.emitted[number]
        return host["commit_base_ns"] + host["commit_row_ns"] * len(step.decode or ()) + tokens_ns

    def device_ns(self, step: StepDone, number: int) -> float:
        chunks = [(length, start) for _, start, length, _ in step.chunks]
        decode = None
        if step.decode is not None:
            decode = Decode(len(step.decode), step.steps, step.topk, step.nodes, step.kv[number])
        return self.roofline.step_ns(chunks, decode)

    def _follow(self, replica: int, moments: list[tuple[str, Any]]) -> None:
        cpu_ns = device_ns = busy_ns = lost_ns = squares = 0.0
        factors = self.factors[replica] = []
        launched: deque[list[Any]] = deque()  # [step, when it was launched]
        for kind, what in moments:
            if kind == "reset":
                cpu_ns = device_ns = what
                launched.clear()
            elif kind == "lost":
                # It failed while the host waited for it, or had done so before the host looked.
                ran_ns = max(what - max(device_ns, launched[0][1]), 0.0)
                if what > cpu_ns + NEAR_NS:
                    busy_ns += ran_ns
                else:
                    lost_ns += ran_ns
            elif kind == "plan":
                cpu_ns = what.planned_ns + self.plan_ns(what)
                launched.append([what, cpu_ns])
            else:
                step, launch_ns = launched.popleft()
                behind = launched[0] if launched else None
                for number, at_ns in enumerate(step.ends_ns):
                    took_ns = self.device_ns(step, number)
                    busy_ns += took_ns
                    squares += took_ns * took_ns
                    began_ns = max(device_ns, launch_ns)
                    device_ns = began_ns + took_ns
                    if number and behind is not None:  # the host has planned the next round before it takes this one
                        cpu_ns = step.ends_ns[number - 1] + self.plan_ns(step)
                    commit_ns = self.commit_ns(step, number)
                    should_ns = max(cpu_ns, device_ns) + commit_ns
                    if abs(at_ns - should_ns) > (number + 1) * (NEAR_NS + NEAR * took_ns):
                        self.late = self.late or Late(step, number, should_ns)
                    if at_ns - launch_ns < self.roofline.target.least_ns:
                        self.too_fast = self.too_fast or Late(step, number, launch_ns + self.roofline.target.least_ns)
                    is_known = at_ns > max(cpu_ns, 0) + commit_ns + NEAR_NS
                    factors.append(max(at_ns - commit_ns - began_ns, 1.0) / took_ns if is_known else None)
                    if is_known:
                        device_ns = at_ns - commit_ns  # it kept the host waiting, so its rounding is known
                    launch_ns = self._next_launch(step, number, launch_ns, at_ns, behind)
                    cpu_ns = at_ns
                if behind is not None:
                    behind[1] = launch_ns
        self.busy_ns[replica], self.lost_ns[replica], self.spread_ns[replica] = busy_ns, lost_ns, squares**0.5

    def _next_launch(
        self, step: StepDone, number: int, launch_ns: float, at_ns: int, behind: list[Any] | None
    ) -> float:
        if behind is None:
            return at_ns + self.plan_ns(step)
        return behind[1] if number == 0 else step.ends_ns[number - 1] + self.plan_ns(step)
