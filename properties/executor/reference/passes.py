"""The forward passes of the reference executor, of target and draft, over KV whose cells record their writer.

```
prompt chunk   KV of the target ─► draft_prompt ─► after the last chunk: first_token ─► relay_first
decode round   relayed cells ─► draft ─► verify, accept, compact ─► draft-extend pass ─► relayed cells
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ....core.acceptance.process import AcceptanceProcess
from ....core.adaptive.lengths.survival import acceptance_of, choose_nodes
from ....core.contract.future_map import FutureMap
from ....core.contract.hidden import CaptureHiddenMode, ForwardPhase, check_hidden
from ....core.contract.request import Request
from ....core.contract.step import ChosenNodes, DecodeStep
from ....core.draws import request_key
from ....core.errors import InvariantViolation
from ....core.tree.build import VerifyTree, shorten_trees
from ....core.tree.outputs import Finalized, NodeOutputs, finalize
from ....core.tree.verify import Verified
from .drafting import Drafted, DraftRequest, ReferenceDrafter
from .language_model import extend_hash, hash_of, hidden_of, node_outputs
from .outputs import sample, verify
from .shadow import PrefixRead, ShadowKV, ShadowStates


@dataclass(slots=True)
class RowState:
    """What the device side knows of a request in a row."""

    epoch: int
    request: Request
    key: int  # of the request's draws
    remaining: int  # tokens that it may still emit
    ended: bool = False
    message: str = ""  # why it failed, empty if it did not


class ReferencePasses:
    """Computes prompts and decode rounds. `alloc_len` is the most KV slots that a round may write per row;
    `acceptance` and `fail_at` are those of `ReferenceExecutor`. `states`: of a model with recurrent layers."""

    def __init__(
        self,
        drafter: ReferenceDrafter,
        future_map: FutureMap,
        alloc_len: int,
        acceptance: AcceptanceProcess | None,
        fail_at: Mapping[str, int],
        states: ShadowStates | None,
    ) -> None:
        self.algorithm = drafter.algorithm
        self.model = drafter.draft.target
        self.kv: ShadowKV = drafter.kv
        self.drafter = drafter
        self.future_map = future_map
        self.alloc_len = alloc_len
        self.states: ShadowStates | None = states
        self.acceptance = acceptance
        self.fail_at = dict(fail_at)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def prompt(self, row: int, start: int, tokens: np.ndarray) -> PrefixRead:
        """Run the target's pass over a chunk. Returns the whole prefix up to its end."""
        prefix = self.kv.compute(row, start, tokens)
        if self.states is None:
            return prefix
        hashes = self.states.run_chunk(row, int(self.kv.salts[row]), start, tokens)
        return PrefixRead(prefix.tokens, np.concatenate([prefix.hashes[:start], hashes]))

    def draft_prompt(self, row: int, start: int, prefix: PrefixRead, next_token: int, is_parked: bool) -> None:
        """Run the draft's own pass over the chunk; `next_token` is the one after it: the prompt's, or the sample. A
        parked draft computes nothing, so later reads of these positions find that they are not written."""
        if self.kv.draft is None or is_parked:
            return
        head = PrefixRead(prefix.tokens[:start], prefix.hashes[:start])
        self.kv.read_draft(row, head, int(prefix.tokens[start]))
        self.kv.write_draft(row, start, prefix.tokens[start:], prefix.hashes[start:], next_token)

    def first_token(self, state: RowState, prefix: PrefixRead) -> tuple[int, dict[str, np.ndarray]]:
        """Return the first token after a prompt, −1 where the target failed, and the outputs [1, …] that were asked."""
        logits = self.model.logits(prefix.hashes[-1:], prefix.tokens[-1:])
        if self.fail_at.get(state.request.request_id) == len(prefix.tokens) - state.request.prompt.length:
            logits[:] = np.nan
        token = sample([state.request.sampling], [state.key], np.array([len(prefix.tokens) - 1]), logits)
        return int(token[0]), node_outputs(prefix.hashes[-1:], logits, token, state.request.outputs)

    def relay_first(self, state: RowState, row: int, prefix: PrefixRead, token: int, is_parked: bool) -> None:
        """Publish what the first round after the prompt `prefix` starts from, with its first output token."""
        own = self.drafter.first_relay(row, prefix)
        hidden = self._draft_hidden(prefix.hashes[-1:])
        self._relay([state], np.array([row]), prefix.hashes[-1:], np.array([token]), hidden, own, is_parked)

    # -- one decode round ---------------------------------------------------------------------------------------------

    def decode_round(
        self, part: DecodeStep, states: list[RowState], rounds_done: int
    ) -> tuple[Finalized, Verified, ChosenNodes | None]:
        """Run one round of a decode step, whose rows have these states, after `rounds_done` rounds of it. Returns also
        how many nodes each row verified, if the step leaves that to the device."""
        lengths, relayed = self.future_map.resolve(part.rows, part.epochs)
        self._check_lengths(part, rounds_done, lengths)
        request = self._draft_request(part, states, lengths, relayed)
        drafted = self.drafter.tree(request)
        self._check_tree(part, drafted.tree)
        chosen = self._chosen(part, drafted)
        drafted = self._shortened(part if chosen is None else replace(part, row_nodes=chosen.row_nodes), drafted)
        rows = zip(part.rows.tolist(), lengths.tolist(), strict=True)
        windows = np.stack([self.kv.window(row, length, part.shape.nodes) for row, length in rows])
        hashes = self.kv.write_tree(request.rows, request.lengths, request.root_hashes, drafted.tree, windows)
        final, verified = self._verify(states, request, drafted, hashes, windows)
        self._catch_up(states, request, final, verified.accept_lens)
        return final, verified, chosen

    def _check_lengths(self, part: DecodeStep, rounds_done: int, lengths: np.ndarray) -> None:
        most = part.max_seq_lens + rounds_done * self.alloc_len
        if (lengths < part.seq_lens + rounds_done).any() or (lengths > most).any():
            message = f"lengths {lengths.tolist()} are outside {part.seq_lens.tolist()} … {most.tolist()}"
            raise InvariantViolation("RELAY-06", message)
        if (lengths != self.kv.kv_lens[part.rows]).any():
            raise InvariantViolation("RELAY-02", "a relayed length is not the length of the row's KV")

    def _draft_request(
        self, part: DecodeStep, states: list[RowState], lengths: np.ndarray, relayed: dict[str, np.ndarray]
    ) -> DraftRequest:
        roots = relayed["bonus_tokens"]
        prefixes = [self.kv.read_target(r, n) for r, n in zip(part.rows.tolist(), lengths.tolist(), strict=True)]
        last = np.array([prefix.hashes[-1] for prefix in prefixes], dtype=np.uint64)
        if self.states is not None:
            last = self.states.hashes[part.rows]
        hidden = relayed.get("hidden_states")
        check_hidden(hidden, self.algorithm.capture_hidden_mode(ForwardPhase.DRAFT), "relay")
        if part.shape.is_parked:
            hidden = None  # the draft reads neither it nor its own KV
        if hidden is not None and (hash_of(hidden) != last).any():
            raise InvariantViolation("RELAY-02", "a relayed hidden state is not that of the row's last position")
        if self.kv.draft is not None and not part.shape.is_parked:
            for row, prefix, root in zip(part.rows.tolist(), prefixes, roots.tolist(), strict=True):
                self.kv.read_draft(row, prefix, root)
        return DraftRequest(
            part.rows,
            lengths,
            prefixes,
            roots,
            extend_hash(last, roots),
            relayed,
            self._simulated_runs(states, lengths),
            part.shape,
        )

    def _simulated_runs(self, states: list[RowState], lengths: np.ndarray) -> np.ndarray | None:
        """Return how many drafts the acceptance process lets through in the round that begins at these KV lengths."""
        if self.acceptance is None:
            return None
        requests = [state.request for state in states]
        keys = np.array([request_key(request.request_id) for request in requests], dtype=np.uint64)
        prompts = np.array([request.prompt.length for request in requests])
        num_emitted = lengths + 1 - prompts  # the last emitted token has no KV yet
        return self.acceptance.longest_run(keys, num_emitted).astype(np.int64)

    def _check_tree(self, part: DecodeStep, tree: VerifyTree) -> None:
        width = self.algorithm.accept_width(part.shape.steps, part.shape.nodes)
        if tree.num_draft_tokens != part.shape.nodes or tree.width != width:
            raise InvariantViolation(
                "ACCEPT-02",
                f"a tree of {tree.num_draft_tokens} nodes, {tree.width} deep, where {part.shape.nodes} and {width} were planned",
            )
        if tree.positions.size and tree.positions.max() > self.drafter.max_position:
            raise InvariantViolation("STEPS-01", f"position {tree.positions.max()} is past the context")

    def _chosen(self, part: DecodeStep, drafted: Drafted) -> ChosenNodes | None:
        """Return the nodes that rows verify by the step's budget."""
        if part.budget is None:
            return None
        confidence = drafted.confidence
        assert confidence is not None, "only chains that a model drafts have a budget"
        p = acceptance_of(confidence, part.budget.slopes, part.budget.biases)
        most = np.full(len(part.rows), part.shape.nodes) if part.row_nodes is None else part.row_nodes
        return ChosenNodes(choose_nodes(np.cumprod(p, axis=1), most, part.budget.drafts), confidence)

    def _shortened(self, part: DecodeStep, drafted: Drafted) -> Drafted:
        """Return what was drafted, without the nodes that a row does not verify."""
        if part.row_nodes is None:
            return drafted
        return replace(drafted, tree=shorten_trees(drafted.tree, part.row_nodes))

    def _verify(
        self, states: list[RowState], request: DraftRequest, drafted: Drafted, hashes: np.ndarray, windows: np.ndarray
    ) -> tuple[Finalized, Verified]:
        """Run target forward, acceptance and compaction: what stands in the windows afterwards is the accepted path."""
        tree = drafted.tree
        logits = self.model.logits(hashes.ravel(), tree.tokens)
        depths = self.kv.target.positions[windows] - request.lengths[:, None]
        self._inject_failures(states, request, depths, logits)
        params, keys = [state.request.sampling for state in states], [state.key for state in states]
        verified = verify(params, keys, request.lengths, tree, logits)
        wanted = {name for state in states for name in state.request.outputs}
        outputs = node_outputs(hashes.ravel(), logits, verified.predict, wanted)
        next_relay = {name: values.reshape(-1, *values.shape[2:]) for name, values in drafted.next_relay.items()}
        final = finalize(verified, windows, NodeOutputs(outputs, next_relay, self._draft_hidden(hashes.ravel())))
        final.moves.check(self.kv.target.num_slots, windows)
        self.kv.target.move(final.moves)
        self.kv.kv_lens[request.rows] = request.lengths + verified.accept_lens
        if self.states is not None:
            self.states.keep(request.rows, hashes, verified.accept_index, verified.accept_lens)
        return final, verified

    def _inject_failures(
        self, states: list[RowState], request: DraftRequest, depths: np.ndarray, logits: np.ndarray
    ) -> None:
        for i, state in enumerate(states):
            index = self.fail_at.get(state.request.request_id)
            if index is not None:
                emits = request.lengths[i] + 1 + depths[i] - state.request.prompt.length
                logits.reshape(*depths.shape, -1)[i, emits == index] = np.nan

    def _catch_up(
        self, states: list[RowState], request: DraftRequest, final: Finalized, accept_lens: np.ndarray
    ) -> None:
        """Run the draft-extend pass: draft KV of every accepted position, then what the next round starts from."""
        last_hashes = np.empty(len(accept_lens), dtype=np.uint64)
        for i, row in enumerate(request.rows.tolist()):
            length, count = int(request.lengths[i]), int(accept_lens[i])
            prefix = self.kv.read_target(row, length + count)
            last_hashes[i] = prefix.hashes[-1]
            if self.kv.draft is not None and not request.shape.is_parked:
                bonus = int(final.bonus_tokens[i])
                self.kv.write_draft(row, length, prefix.tokens[length:], prefix.hashes[length:], bonus)
                self.kv.read_draft(row, prefix, bonus)
        last_nodes = np.arange(len(accept_lens)) * request.shape.nodes + accept_lens - 1
        hidden = final.outputs.draft_hidden
        if hidden is not None:
            hidden = hidden[last_nodes]
        own = {name: values[last_nodes] for name, values in final.outputs.next_relay.items()}
        self._relay(
            states, request.rows, last_hashes, final.bonus_tokens.astype(np.int64), hidden, own, request.shape.is_parked
        )

    def _relay(
        self,
        states: list[RowState],
        rows: np.ndarray,
        last_hashes: np.ndarray,
        tokens: np.ndarray,
        hidden: np.ndarray | None,
        own: dict[str, np.ndarray],
        is_parked: bool,
    ) -> None:
        """Publish the lengths and stash what the next round drafts from; `own` are the fields of a proposer. A parked
        draft relays zeros."""
        lengths, epochs = self.kv.kv_lens[rows], self.kv.stays[rows] & 0xFFFFFFFF
        self.future_map.publish(rows, epochs, lengths)
        values: dict[str, np.ndarray | None] = {"bonus_tokens": tokens, **own}
        names = [f.name for f in self.future_map.fields]
        if "topk_ids" in names:
            runs = self._simulated_runs(states, lengths)
            ids, probabilities = self.drafter.relay(extend_hash(last_hashes, tokens), tokens, runs)
            values |= {"topk_ids": ids, "topk_probabilities": probabilities}
            if is_parked:
                values |= {"topk_ids": np.zeros_like(ids), "topk_probabilities": np.zeros_like(probabilities)}
        check_hidden(hidden, self.algorithm.capture_hidden_mode(ForwardPhase.PREFILL), "capture")
        if self.algorithm.needs_hidden_states:  # block drafters read them in the pass that captures them
            values["hidden_states"] = hidden
        check_hidden(values.get("hidden_states"), self.algorithm.capture_hidden_mode(ForwardPhase.DRAFT), "stash")
        self.future_map.stash(rows, epochs, values)

    def _draft_hidden(self, hashes: np.ndarray) -> np.ndarray | None:
        mode = self.algorithm.capture_hidden_mode(ForwardPhase.PREFILL)
        return None if mode is CaptureHiddenMode.NULL else hidden_of(hashes)
