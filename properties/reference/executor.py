"""The reference executor: the oracle of what a device must do with a step, in NumPy, with every read and write checked.

Launching records a step, collecting runs it: results come in order, and a stop that arrives in between counts.

```
launch(k)  launch(k+1)   …   advance / collect(k): released → joins → table writes → prefill → rounds     (stream order)
   └── checked at once: nothing that an uncollected step writes is handed out
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...core.acceptance.process import AcceptanceProcess
from ...core.algorithm.algorithm import AlgorithmShape
from ...core.algorithm.arrival import fill_cells
from ...core.contract.future_map import FutureMap
from ...core.contract.hidden import ForwardPhase, check_hidden
from ...core.contract.request import Request, first_stop_token
from ...core.contract.step import Arrivals, DecodeStep, Join, PrefillResult, PrefillStep, RoundRecord, Step, StepResult
from ...core.draws import request_key
from ...core.errors import InvariantViolation
from ...core.scheduler.engine import Engine
from ...core.tree.build import VerifyTree
from ...core.tree.outputs import Finalized, NodeOutputs, finalize
from .drafting import Drafted, DraftRequest, ReferenceDrafter
from .language_model import (
    HIDDEN_SIZE,
    HashDraft,
    HashLanguageModel,
    extend_hash,
    hash_of,
    hidden_of,
    namespace_salt,
    node_outputs,
)
from .outputs import DRAFT_HIDDEN, NEXT_RELAY, as_columns, by_name, sample, verify
from .shadow import PrefixRead, ShadowKV, check_launch

ROUND_NS = 1000
"""What a round is said to take: the reference has no clock, but its results are stamped."""


@dataclass(slots=True)
class RowState:
    """What the device side knows of a request in a row."""

    epoch: int
    request: Request
    key: int  # of the request's draws
    remaining: int  # tokens that it may still emit
    ended: bool = False
    message: str = ""  # why it failed, empty if it did not


@dataclass(slots=True)
class Running:
    """The oldest launched step while it runs."""

    step: Step
    limit: int  # rounds after which it returns
    prefill: PrefillResult | None = None
    decoded: RoundRecord = field(default_factory=RoundRecord)
    failures: list[tuple[int, str]] = field(default_factory=list)


class ReferenceExecutor:
    """Executes the steps of one engine, whose configuration must track tokens.

    `acceptance` decides how many drafts are right, if not the draft's own agreement; `fail_at` maps request ids to the
    output index whose logits are NaN.
    """

    def __init__(
        self,
        engine: Engine,
        draft: HashDraft,
        *,
        acceptance: AcceptanceProcess | None = None,
        fail_at: Mapping[str, int] | None = None,
    ) -> None:
        config, sizes, algorithm = engine.config, engine.sizes, engine.algorithm
        assert config.track_tokens, "the reference executor needs EngineConfig.track_tokens"
        self.algorithm = algorithm
        self.model: HashLanguageModel = draft.target
        self.page_size = config.page_size
        self.alloc_len = sizes.alloc_len
        self.acceptance = acceptance
        self.fail_at = dict(fail_at or {})
        num_rows, num_slots = config.max_running, (config.num_pages + 1) * config.page_size
        self.kv = ShadowKV(num_rows, sizes.row_width, num_slots, algorithm.draft_kv.value)
        shape = AlgorithmShape(
            sizes.max_steps, engine.controller.topk, HIDDEN_SIZE, target_vocab_size=draft.target.vocab_size
        )
        self.future_map = FutureMap(num_rows, algorithm.relay_fields(shape), debug_poison=True)
        self.max_position = config.context_len - 1
        self.drafter = ReferenceDrafter(algorithm, draft, self.kv, config.page_size, shape, self.max_position)
        self.num_rounds = 0
        self.num_drafted = 0  # draft nodes verified
        self.num_correct_drafts = 0
        self._rows: list[RowState | None] = [None] * (num_rows + 1)
        self._queue: deque[Step] = deque()
        self._running: Running | None = None
        self._last_step_id = 0
        self._stop_through = 0
        self.launched_table = np.zeros((num_rows + 1, sizes.row_width), dtype=np.int32)

    # -- the port -------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Put `step` behind those in flight. Raises InvariantViolation if it disturbs one of them."""
        if step.step_id != self._last_step_id + 1:
            raise InvariantViolation("RELAY-07", f"step {step.step_id} is launched after step {self._last_step_id}")
        self._last_step_id = step.step_id
        earlier = [(other, self._rounds_left(other)) for other in self._queue]
        check_launch(step, earlier, self.kv, self.launched_table, self.alloc_len)
        writes = step.table_writes
        self.launched_table[writes.rows, writes.columns] = writes.slots
        self._queue.append(step)

    def collect(self) -> StepResult:
        """Run the oldest step to its end and answer it."""
        while not self.advance(1):
            pass
        running = self._running
        self._running = None
        self._queue.popleft()
        return self._result(running)

    def advance(self, rounds: int) -> bool:
        """Run up to `rounds` decode rounds of the oldest launched step, at least its start; says whether it is over."""
        if self._running is None:
            self._running = self._start(self._queue[0])
        running = self._running
        for _ in range(rounds):
            if self._is_over(running):
                break
            self._round(running)
        return self._is_over(running)

    def request_stop(self, last_step_id: int) -> None:
        """End steps up to `last_step_id` at their next round boundary; the round that runs now is finished."""
        self._stop_through = max(self._stop_through, last_step_id)
        running = self._running
        if running is not None and running.step.step_id <= last_step_id:
            running.limit = min(running.limit, running.decoded.rounds + 1)

    def request_in(self, row: int) -> str:
        """Return the id of the request whose state the device has in `row`, empty if it has none."""
        state = self._rows[row]
        return state.request.request_id if state is not None else ""

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    # -- running --------------------------------------------------------------------------------------------------

    def _rounds_left(self, step: Step) -> int:
        """Decode rounds that a launched step may still run."""
        if step.decode is None:
            return 0
        if self._running is not None and self._running.step is step:
            return self._running.limit - self._running.decoded.rounds
        return 1 if step.step_id <= self._stop_through or self._has_ended_row(step) else step.max_rounds

    def _start(self, step: Step) -> Running:
        for row, epoch in step.released:
            self.kv.close_row(row, epoch)
            self.future_map.drop(np.array([row]))
            self._rows[row] = None
        for join in step.joins:
            self._join(join)
        writes = step.table_writes
        self.kv.write_table(writes.rows, writes.columns, writes.slots)
        running = Running(step, step.max_rounds)
        for join in step.joins:
            if join.request.sampling.is_shaped:
                message = "the reference executor has no biases, penalties, min_p or grammars"
                self._fail(self._rows[join.row], join.row, running, message)
        if step.arrivals is not None:
            self._arrive(step.arrivals, running)
        if step.step_id <= self._stop_through or self._has_ended_row(step):
            running.limit = 1
        if step.prefill is not None:
            running.prefill = self._prefill(step.prefill, running)
        return running

    def _has_ended_row(self, step: Step) -> bool:
        """Return whether a request of the step is known to have ended in an earlier one."""
        if step.decode is None:
            return False
        states = [self._rows[row] for row in step.decode.rows.tolist()]
        epochs = step.decode.epochs.tolist()
        return any(s is not None and s.epoch == e and s.ended for s, e in zip(states, epochs, strict=True))

    def _join(self, join: Join) -> None:
        if self._rows[join.row] is not None:
            raise InvariantViolation("RELAY-03", f"row {join.row} is given away before it was released")
        request = join.request
        key = request.sampling.seed or request_key(request.request_id)
        self._rows[join.row] = RowState(join.epoch, request, key, join.max_tokens - join.num_emitted)
        self.kv.open_row(join.row, join.epoch, namespace_salt(request.namespace), join.num_cached)

    def _arrive(self, arrivals: Arrivals, running: Running) -> None:
        """Take rows whose KV another worker has computed:
        read every cell once, then fill their first relay cells without a pass."""
        batch, last_tokens = arrivals.batch, arrivals.first_tokens
        for row, length, token in zip(batch.rows.tolist(), batch.seq_lens.tolist(), last_tokens.tolist(), strict=True):
            self.kv.kv_lens[row] = length
            prefix = self.kv.read_target(row, length)
            if self.kv.draft is not None:
                self.kv.read_draft(row, prefix, token)
        for row, message in fill_cells(self.algorithm, arrivals, self.future_map):
            self._fail(self._rows[row], row, running, message)

    def _is_over(self, running: Running) -> bool:
        if running.step.decode is None:
            return True
        return running.decoded.is_over(running.limit)

    def _state(self, row: int, epoch: int) -> RowState:
        state = self._rows[row]
        if state is None or state.epoch != epoch:
            raise InvariantViolation("RELAY-03", f"a step runs row {row} of epoch {epoch}, which has another owner")
        return state

    # -- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, part: PrefillStep, running: Running) -> PrefillResult:
        n = len(part.rows)
        tokens = np.full(n, -1, dtype=np.int64)
        stopped = np.zeros(n, dtype=bool)
        outputs: list[dict[str, np.ndarray] | None] = [None] * n
        offset = 0
        for i in range(n):
            row, start, length = int(part.rows[i]), int(part.starts[i]), int(part.lens[i])
            state = self._state(row, int(part.epochs[i]))
            chunk = part.tokens[offset : offset + length]
            offset += length
            prefix = self.kv.compute(row, start, chunk)
            if not part.is_last[i]:
                self._draft_prefill(row, start, prefix, int(part.tail_tokens[i]))
                continue
            token, outputs[i] = self._first_token(state, prefix)
            if token < 0:
                self._fail(state, row, running)
                token = 0
            if part.tail_tokens[i] >= 0:
                token = int(part.tail_tokens[i])
            self._draft_prefill(row, start, prefix, token)
            tokens[i] = token
            stopped[i] = first_stop_token(np.array([token]), state.request.stop_tokens) >= 0
            state.remaining -= 1
            state.ended = state.ended or bool(stopped[i]) or state.remaining == 0
            hidden = self._draft_hidden(prefix.hashes[-1:])
            one = slice(i, i + 1)
            own = self.drafter.first_relay(row, prefix)
            self._relay(part.rows[one], part.epochs[one], prefix.hashes[-1:], np.array([token]), hidden, own)
        return PrefillResult(tokens, stopped if stopped.any() else None, by_name(outputs))

    def _draft_prefill(self, row: int, start: int, prefix: PrefixRead, next_token: int) -> None:
        """Run the draft's own pass over the chunk; `next_token` is the one after it: the prompt's, or the sample."""
        if self.kv.draft is None:
            return
        head = PrefixRead(prefix.tokens[:start], prefix.hashes[:start])
        self.kv.read_draft(row, head, int(prefix.tokens[start]))
        self.kv.write_draft(row, start, prefix.tokens[start:], prefix.hashes[start:], next_token)

    def _first_token(self, state: RowState, prefix: PrefixRead) -> tuple[int, dict[str, np.ndarray]]:
        logits = self.model.logits(prefix.hashes[-1:], prefix.tokens[-1:])
        if self.fail_at.get(state.request.request_id) == len(prefix.tokens) - state.request.prompt.length:
            logits[:] = np.nan
        token = sample([state.request.sampling], [state.key], np.array([len(prefix.tokens) - 1]), logits)
        return int(token[0]), node_outputs(prefix.hashes[-1:], logits, token, state.request.outputs)

    def _draft_hidden(self, hashes: np.ndarray) -> np.ndarray | None:
        hidden = hidden_of(hashes) if self.algorithm.needs_hidden_states else None
        check_hidden(hidden, self.algorithm.capture_hidden_mode(ForwardPhase.PREFILL), "capture")
        return hidden

    @staticmethod
    def _fail(state: RowState, row: int, running: Running, message: str = "the target gave no distribution") -> None:
        if not state.message:
            state.message = message
            running.failures.append((row, state.message))
        state.ended = True

    # -- one decode round -----------------------------------------------------------------------------------------

    def _round(self, running: Running) -> None:
        part = running.step.decode
        states = [self._state(row, epoch) for row, epoch in zip(part.rows.tolist(), part.epochs.tolist(), strict=True)]
        was_over = np.array([state.ended for state in states])
        lengths, relayed = self.future_map.resolve(part.rows, part.epochs)
        self._check_lengths(part, running.decoded.rounds, lengths)
        request = self._draft_request(part, lengths, relayed)
        drafted = self.drafter.tree(request)
        tree = drafted.tree
        self._check_tree(part, tree)
        windows = np.stack(
            [
                self.kv.window(r, n, tree.num_draft_tokens)
                for r, n in zip(part.rows.tolist(), lengths.tolist(), strict=True)
            ]
        )
        hashes = self.kv.write_tree(request.rows, request.lengths, request.root_hashes, tree, windows)
        final, accept_lens, failed = self._verify(states, request, drafted, hashes, windows)
        self._catch_up(request, final, accept_lens, tree.num_draft_tokens)
        for i in np.flatnonzero(failed & ~was_over).tolist():
            self._fail(states[i], int(part.rows[i]), running)
        self._settle(running, states, was_over, final, accept_lens)
        self.num_rounds += 1
        self.num_drafted += len(states) * (tree.num_draft_tokens - 1)
        self.num_correct_drafts += int((accept_lens - 1).sum())

    def _check_lengths(self, part: DecodeStep, rounds_done: int, lengths: np.ndarray) -> None:
        most = part.max_seq_lens + rounds_done * self.alloc_len
        if (lengths < part.seq_lens + rounds_done).any() or (lengths > most).any():
            message = f"lengths {lengths.tolist()} are outside {part.seq_lens.tolist()} … {most.tolist()}"
            raise InvariantViolation("RELAY-06", message)
        if (lengths != self.kv.kv_lens[part.rows]).any():
            raise InvariantViolation("RELAY-02", "a relayed length is not the length of the row's KV")

    def _draft_request(self, part: DecodeStep, lengths: np.ndarray, relayed: dict[str, np.ndarray]) -> DraftRequest:
        roots = relayed["bonus_tokens"]
        prefixes = [self.kv.read_target(r, n) for r, n in zip(part.rows.tolist(), lengths.tolist(), strict=True)]
        last = np.array([prefix.hashes[-1] for prefix in prefixes], dtype=np.uint64)
        hidden = relayed.get("hidden_states")
        check_hidden(hidden, self.algorithm.capture_hidden_mode(ForwardPhase.DRAFT), "relay")
        if hidden is not None and (hash_of(hidden) != last).any():
            raise InvariantViolation("RELAY-02", "a relayed hidden state is not that of the row's last position")
        if self.kv.draft is not None:
            for row, prefix, root in zip(part.rows.tolist(), prefixes, roots.tolist(), strict=True):
                self.kv.read_draft(row, prefix, root)
        return DraftRequest(
            part.rows,
            lengths,
            prefixes,
            roots,
            extend_hash(last, roots),
            relayed,
            self._simulated_runs(part.rows, lengths),
            part.steps,
            part.topk,
            part.num_draft_tokens,
        )

    def _simulated_runs(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Return how many drafts the acceptance process lets through in the round that begins at these KV lengths."""
        if self.acceptance is None:
            return None
        requests = [self._rows[row].request for row in rows.tolist()]
        keys = np.array([request_key(request.request_id) for request in requests], dtype=np.uint64)
        prompts = np.array([request.prompt.length for request in requests])
        return self.acceptance.longest_run(keys, lengths - prompts).astype(np.int64)

    def _check_tree(self, part: DecodeStep, tree: VerifyTree) -> None:
        width = self.algorithm.accept_width(part.steps, part.num_draft_tokens)
        if tree.num_draft_tokens != part.num_draft_tokens or tree.width != width:
            raise InvariantViolation(
                "ACCEPT-02",
                f"a tree of {tree.num_draft_tokens} nodes, {tree.width} deep, where {part.num_draft_tokens} and {width} were planned",
            )
        if tree.positions.size and tree.positions.max() > self.max_position:
            raise InvariantViolation("STEPS-01", f"position {tree.positions.max()} is past the context")

    def _verify(
        self, states: list[RowState], request: DraftRequest, drafted: Drafted, hashes: np.ndarray, windows: np.ndarray
    ) -> tuple[Finalized, np.ndarray, np.ndarray]:
        """Run target forward, acceptance and compaction: what stands in the windows afterwards is the accepted path."""
        tree = drafted.tree
        logits = self.model.logits(hashes.ravel(), tree.tokens)
        depths = self.kv.target.positions[windows] - request.lengths[:, None]
        self._inject_failures(states, request, depths, logits)
        params, keys = [state.request.sampling for state in states], [state.key for state in states]
        verified = verify(params, keys, request.lengths, tree, logits)
        wanted = {name for state in states for name in state.request.outputs}
        outputs = node_outputs(hashes.ravel(), logits, verified.predict, wanted)
        outputs[DRAFT_HIDDEN] = self._draft_hidden(hashes.ravel())
        outputs |= {
            NEXT_RELAY + name: values.reshape(-1, *values.shape[2:]) for name, values in drafted.next_relay.items()
        }
        final = finalize(verified, windows, NodeOutputs(outputs))
        final.moves.check(self.kv.target.num_slots, windows)
        self.kv.target.move(final.moves)
        self.kv.kv_lens[request.rows] = request.lengths + verified.accept_lens
        return final, verified.accept_lens, verified.target_failed

    def _inject_failures(
        self, states: list[RowState], request: DraftRequest, depths: np.ndarray, logits: np.ndarray
    ) -> None:
        for i, state in enumerate(states):
            index = self.fail_at.get(state.request.request_id)
            if index is not None:
                emits = request.lengths[i] + 1 + depths[i] - state.request.prompt.length
                logits.reshape(*depths.shape, -1)[i, emits == index] = np.nan

    def _catch_up(self, request: DraftRequest, final: Finalized, accept_lens: np.ndarray, nodes: int) -> None:
        """Run the draft-extend pass: draft KV of every accepted position, then what the next round starts from."""
        last_hashes = np.empty(len(accept_lens), dtype=np.uint64)
        for i, row in enumerate(request.rows.tolist()):
            length, count = int(request.lengths[i]), int(accept_lens[i])
            prefix = self.kv.read_target(row, length + count)
            last_hashes[i] = prefix.hashes[-1]
            if self.kv.draft is not None:
                bonus = int(final.bonus_tokens[i])
                self.kv.write_draft(row, length, prefix.tokens[length:], prefix.hashes[length:], bonus)
                self.kv.read_draft(row, prefix, bonus)
        last_nodes = np.arange(len(accept_lens)) * nodes + accept_lens - 1
        hidden = final.outputs[DRAFT_HIDDEN]
        if hidden is not None:
            hidden = hidden[last_nodes]
        own = {
            name.removeprefix(NEXT_RELAY): final.outputs[name][last_nodes]
            for name in final.outputs
            if name.startswith(NEXT_RELAY)
        }
        epochs = self.kv.stays[request.rows] & 0xFFFFFFFF
        self._relay(request.rows, epochs, last_hashes, final.bonus_tokens.astype(np.int64), hidden, own)

    def _relay(
        self,
        rows: np.ndarray,
        epochs: np.ndarray,
        last_hashes: np.ndarray,
        tokens: np.ndarray,
        hidden: np.ndarray | None,
        own: dict[str, np.ndarray],
    ) -> None:
        """Publish the lengths and stash what the next round drafts from; `own` are the fields of a proposer."""
        lengths = self.kv.kv_lens[rows]
        self.future_map.publish(rows, epochs, lengths)
        values: dict[str, np.ndarray | None] = {"bonus_tokens": tokens, **own}
        names = [f.name for f in self.future_map.fields]
        if "topk_ids" in names:
            runs = self._simulated_runs(rows, lengths)
            ids, probabilities = self.drafter.relay(extend_hash(last_hashes, tokens), tokens, runs)
            values |= {"topk_ids": ids, "topk_probabilities": probabilities}
        if hidden is not None:
            values["hidden_states"] = hidden
        check_hidden(values.get("hidden_states"), self.algorithm.capture_hidden_mode(ForwardPhase.DRAFT), "stash")
        self.future_map.stash(rows, epochs, values)

    def _settle(
        self, running: Running, states: list[RowState], was_over: np.ndarray, final: Finalized, accept_lens: np.ndarray
    ) -> None:
        """Find out who ended in this round, and keep what the result will say of it."""
        emitted = final.emitted_tokens
        stops = np.full(len(states), -1, dtype=np.int32)
        ended = np.zeros(len(states), dtype=bool)
        for i, state in enumerate(states):
            if was_over[i]:
                continue
            run = emitted[i, : accept_lens[i]]
            stops[i] = first_stop_token(run, state.request.stop_tokens)
            cut = stops[i] + 1 if stops[i] >= 0 else len(run)
            kept = min(cut, state.remaining)
            state.remaining -= kept
            ended[i] = state.ended or state.remaining == 0 or (stops[i] >= 0 and kept == cut)
            state.ended = bool(ended[i])
        outputs = as_columns(final.outputs, emitted.shape)
        running.decoded.add(accept_lens.astype(np.int32), stops, emitted.astype(np.int64), outputs, ended)

    # -- answering ------------------------------------------------------------------------------------------------

    def _result(self, running: Running) -> StepResult:
        step, rounds = running.step, max(running.decoded.rounds, 1)
        decode = None if step.decode is None else running.decoded.result(step.max_rounds)
        ends = (self.num_rounds - rounds + 1 + np.arange(rounds)) * ROUND_NS
        return StepResult(step.step_id, running.prefill, decode, ends.astype(np.int64), tuple(running.failures))
