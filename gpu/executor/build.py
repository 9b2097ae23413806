"""From an engine and its models to an executor: pools, drafter, relay sizes."""

from __future__ import annotations

from ...core.adaptive.lengths.confidence import NO_BUDGETS
from ...core.algorithm.algorithm import AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from ...core.algorithm.host_drafts import HostDrafts
from ...core.algorithm.hybrid import HybridChoice
from ...core.algorithm.suffix import SuffixDrafts
from ...core.errors import ConfigError
from ...core.scheduler.config import VERIFY_ALL
from ...core.scheduler.engine import Engine
from ...core.tree.chains import AcceptRule
from ..batch.pools import KVPool, Rings
from ..batch.states import StatePool
from ..draft.block import BlockDraft
from ..draft.branches import BranchDraft
from ..draft.heads import HeadsDraft, carried_size
from ..draft.hybrid import HybridDraft
from ..draft.masked import MaskedDraft
from ..draft.network import DraftNetwork, HeadNetwork, LanguageModelNetwork
from ..draft.port import Draft, NoDraft, ParkedDraft, ProposedDraft
from ..models.decoder import Decoder
from ..models.eagle import DraftHead, MultiLayerEagleHeads
from ..models.heads.block import BlockHead
from ..models.projection import pack_projections
from ..ops.debug import CheckedOps
from ..types.ops import Ops
from .executor import TorchExecutor
from .parts import DEFAULT_OPTIONS, DraftModel, ExecutorModels, ExecutorOptions

DRAWN_FROM = 64
"""A draft is drawn from at most so many of its likeliest tokens."""


def build_executor(
    engine: Engine,
    target: Decoder,
    draft_model: DraftModel | None,
    ops: Ops,
    options: ExecutorOptions = DEFAULT_OPTIONS,
) -> TorchExecutor:
    """Return an executor with the sizes of `engine`, on the device of `target`.

    Rounds are captured when the first needs it. On a CPU the models' weights are laid out for inference: they can then
    be neither changed nor saved. Raises ConfigError if the draft does not belong to the algorithm, and for an engine
    with a prefix cache and a model with recurrent layers or with rings.
    """
    config = engine.config
    rings = Rings.of(target.config, config, engine.sizes) if options.in_rings else None
    if config.prefix_cache:
        _refuse_prefix_cache(target, draft_model, rings)
    if options.debug:
        num_slots = (config.num_pages + 1) * config.page_size
        ops = CheckedOps(ops, num_slots, config.max_running, 0 if rings is None else rings.num_slots)
    for model in (target, draft_model):
        if model is not None:
            pack_projections(model)
    models = _with_pools(engine, target, draft_model, ops, rings, options)
    executor = TorchExecutor(engine, models, options)
    if options.graph_sizes is not None:
        sizes = options.graph_sizes if models.draft.is_captured else None
        has_budgets = engine.controller.budgets is not NO_BUDGETS
        allowed = options.graph_sampling, options.graph_outputs, config.verify != VERIFY_ALL, has_budgets
        engine.controller.init_states(sizes, lambda keys: executor.graphs.allow(keys, *allowed))
    return executor


def _refuse_prefix_cache(target: Decoder, draft_model: DraftModel | None, rings: Rings | None) -> None:
    if rings is not None:
        raise ConfigError.of("<engine>", "prefix_cache", "must be off: a ring keeps no prefix for other requests")
    if any(getattr(model, "state_shapes", ()) for model in (target, draft_model)):
        message = "must be off: a model with recurrent layers keeps no state behind a cached prefix"
        raise ConfigError.of("<engine>", "prefix_cache", message)


def _with_pools(
    engine: Engine,
    target: Decoder,
    draft_model: DraftModel | None,
    ops: Ops,
    rings: Rings | None,
    options: ExecutorOptions,
) -> ExecutorModels:
    """Return the models with pools for all slots of the engine, and the draft of its algorithm."""
    config, algorithm, debug = engine.config, engine.algorithm, options.debug
    num_slots = (config.num_pages + 1) * config.page_size
    pool = pool_for(target, num_slots, target, config.max_running, debug, rings)
    draft_pool = None
    if algorithm.draft_kv is not DraftKV.NONE:
        draft_pool = pool_for(required(draft_model, algorithm.name), num_slots, target, config.max_running, debug)
    heads = (
        draft_model if algorithm.drafter is Drafter.HEADS and isinstance(draft_model, MultiLayerEagleHeads) else None
    )
    shape = AlgorithmShape(
        steps=engine.sizes.max_steps if heads is None else heads.num_layers,
        topk=_relayed_topk(engine, target, draft_model, options.accept_rule),
        hidden_size=relayed_hidden_size(algorithm.drafter, draft_model),
        target_vocab_size=target.vocab_size,
    )
    draft = _draft(algorithm, draft_model, ops, draft_pool, engine, shape)
    if algorithm.looks_up_past_outputs and draft_pool is not None:
        draft = _with_look_ups(draft, ops, engine, shape, options)
    parked = ParkedDraft(ops, algorithm.relay_fields(shape)[1:])
    return ExecutorModels(ops, target, pool, draft, parked, draft_model, draft_pool, relayed=shape)


def _relayed_topk(engine: Engine, target: Decoder, draft_model: DraftModel | None, rule: AcceptRule) -> int:
    """Return how many candidates a round relays for the first draft of the next one. Raises ConfigError for a rule of
    chains where drafts are trees."""
    topk, algorithm = engine.controller.topk, engine.algorithm
    is_drawn = rule.draws_drafts and algorithm.drafter in (Drafter.MODEL, Drafter.HEAD) and not algorithm.in_one_pass
    if draft_model is None or not is_drawn:
        return topk
    if topk > 1:
        message = f"{rule} verifies chains, and with topk {topk} drafts are trees; expected {AcceptRule.TARGET}"
        raise ConfigError.of("<engine>", "accept_rule", message)
    twins = draft_model.twins if isinstance(draft_model, Decoder) else None
    own = draft_model.vocab_size if twins is None else len(twins.own_ids)
    return min(DRAWN_FROM, own, target.vocab_size)


def pool_for(
    model: DraftModel,
    num_slots: int,
    target: Decoder,
    num_rows: int = 0,
    debug: bool = False,
    rings: Rings | None = None,
) -> KVPool:
    """Return the pool of a model, with a state for each of `num_rows` rows if it has recurrent layers."""
    shapes = model.state_shapes if isinstance(model, Decoder) else ()
    states = StatePool(shapes, num_rows, target.dtype, target.device, debug) if shapes else None
    return KVPool(model.kv_shapes, num_slots, target.kv_dtype, target.device, states, rings, model.kv_scales)


def required(draft_model: DraftModel | None, algorithm: str) -> DraftModel:
    if draft_model is None:
        raise ConfigError.of("<arguments>", "draft", f"{algorithm} needs a draft checkpoint")
    return draft_model


def relayed_hidden_size(drafter: Drafter, draft_model: DraftModel | None) -> int:
    """Return how many values a row's relayed hidden state has; 0 where there is none."""
    if drafter is Drafter.HEADS and isinstance(draft_model, MultiLayerEagleHeads):
        return carried_size(draft_model)
    return draft_model.hidden_size if drafter is Drafter.HEAD and draft_model is not None else 0


def _draft(
    algorithm: SpecAlgorithm,
    model: DraftModel | None,
    ops: Ops,
    pool: KVPool | None,
    engine: Engine,
    shape: AlgorithmShape,
) -> Draft:
    drafter, name = algorithm.drafter, algorithm.name
    topk, page_size = shape.topk, engine.config.page_size
    draws = topk > engine.controller.topk
    if drafter is Drafter.NONE:
        return NoDraft(ops)
    if drafter is Drafter.LOOKUP:
        return ProposedDraft(ops, HostDrafts(algorithm, shape))
    assert pool is not None and shape.target_vocab_size is not None, "a network has KV of its own"

    def network_draft(network: DraftNetwork) -> Draft:
        if algorithm.in_one_pass:
            return MaskedDraft(ops, network, pool, shape.steps)
        return BranchDraft(ops, network, pool, topk, page_size, draws)

    if drafter is Drafter.HEADS:
        if not isinstance(model, MultiLayerEagleHeads):
            raise _another_form(name, "one head per step")
        return HeadsDraft(ops, model, pool, topk, engine.config.max_running)
    if drafter is Drafter.BLOCK:
        if not isinstance(model, BlockHead):
            raise _another_form(name, "a block of masks")
        return BlockDraft(ops, model, pool)
    if drafter is Drafter.HEAD:
        if not isinstance(model, DraftHead) or isinstance(model, MultiLayerEagleHeads | BlockHead):
            raise _another_form(name, "one head for all steps")
        return network_draft(HeadNetwork(model))
    if not isinstance(model, Decoder):
        raise _another_form(name, "a language model")
    return network_draft(LanguageModelNetwork(model, shape.target_vocab_size))


def _with_look_ups(
    draft: Draft, ops: Ops, engine: Engine, shape: AlgorithmShape, options: ExecutorOptions
) -> HybridDraft:
    """Return a draft that leaves rows to look-ups. Raises ConfigError where acceptance is simulated, and for rules that
    verify drawn drafts: those of look-ups are not."""
    assert isinstance(draft, BranchDraft), "a head for all steps"
    if options.acceptance is not None:
        message = f"cannot be simulated with {engine.algorithm.name}, which drafts by what is accepted"
        raise ConfigError.of("<arguments>", "acceptance", message)
    if options.accept_rule.draws_drafts:
        message = f"{options.accept_rule}: {engine.algorithm.name} has drafts of look-ups, which are not drawn"
        raise ConfigError.of("<arguments>", "accept_rule", f"{message}; expected {AcceptRule.TARGET}")
    fields = engine.algorithm.relay_fields(shape)[1:]
    choice = HybridChoice(shape.steps, options.hybrid_costs)
    return HybridDraft(ops, draft, SuffixDrafts(), choice, fields, keeps_closed=engine.config.prefix_cache)


def _another_form(name: str, what: str) -> ConfigError:
    return ConfigError.of("<arguments>", "draft", f"{name} drafts with {what}; the checkpoint has another form")
