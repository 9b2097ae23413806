"""Host time and the memory budget."""

from dataclasses import replace

import pytest
from foredraft.core.kv.groups import KVGroup
from foredraft.core.model_shape import Recurrence, lookup_model
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.spec import GRAPH_SIZES
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.draft import eagle3_head, multi_layer_eagle, standalone
from foredraft.sim.cost.hardware import MIB, lookup_gpu
from foredraft.sim.cost.host import FOREDRAFT, HOST_PRESETS, UnknownHostPreset, host_preset
from foredraft.sim.cost.memory import GRAPH_BYTES, InsufficientMemory, MemoryShares, kv_pool_slots
from foredraft.sim.scenario_file import load_scenario

H100 = lookup_gpu("H100")
LLAMA = lookup_model("llama-3.1-8b")
CONFIG = EngineConfig(num_pages=1000, context_len=4096)


@pytest.mark.parametrize("name", HOST_PRESETS)
def test_host_time_is_whole_nanoseconds_and_sourced(name):
    preset = host_preset(name.upper())
    for value in (preset.plan_ns(7), preset.launch_ns(7), preset.commit_ns(7, 21)):
        assert type(value) is int
        assert value > 0
    assert all(source for *_, source in preset.explain())


def test_unknown_host_and_fractions_of_a_nanosecond():
    with pytest.raises(UnknownHostPreset, match="did you mean 'foredraft'"):
        host_preset("fordraft")
    with pytest.raises(AssertionError, match="plan_base_ns must be an integer"):
        replace(FOREDRAFT, plan_base_ns=1.5)


def test_the_memory_terms_fill_the_device():
    plan = kv_pool_slots(LLAMA, H100, draft=eagle3_head(LLAMA), graph_count=6, page_size=16)
    used = sum(plan.terms().values())
    assert plan.total_bytes - 16 * plan.slot_bytes < used <= plan.total_bytes
    assert plan.slots % 16 == 0
    # One page is the padding page.
    assert plan.kv_pool_bytes == (plan.slots + 16) * plan.slot_bytes
    assert plan.graphs_bytes == 6 * 25 * MIB
    assert all(source for *_, source in plan.explain(CONFIG))


def test_draft_kv_is_added_to_each_slot():
    small = lookup_model("llama-3.2-1b")
    plain, head = kv_pool_slots(LLAMA, H100), kv_pool_slots(LLAMA, H100, draft=eagle3_head(LLAMA))
    model, multi = (
        kv_pool_slots(LLAMA, H100, draft=draft) for draft in (standalone(small, LLAMA), multi_layer_eagle(LLAMA, 3))
    )
    one_layer = 2 * 8 * 128 * 2
    assert (plain.draft_slot_bytes, head.draft_slot_bytes, multi.draft_slot_bytes) == (0, one_layer, 3 * one_layer)
    assert model.draft_slot_bytes == small.kv_bytes_per_token
    assert model.slots < multi.slots < head.slots < plain.slots
    # Only heads take hidden states.
    assert (plain.hidden_states_bytes, model.hidden_states_bytes) == (0, 0)
    assert head.hidden_states_bytes == 8192 * 3 * 4096 * 2


def test_graphs_by_tokens_are_captured_once_for_all_steps():
    def graphs(*settings):
        return assemble(load_scenario(None, ["speculation.adaptive=zero-to-seven", *settings])[0]).memory.graphs_bytes

    sizes = "hardware.graph_sizes=[8, 64, 512]"
    assert graphs(sizes, "hardware.graph_unit=tokens") == 3 * GRAPH_BYTES
    assert graphs(sizes) > 3 * GRAPH_BYTES
    assert graphs("hardware.graph_unit=tokens") == len(GRAPH_SIZES) * GRAPH_BYTES
    assert graphs("hardware.graph_unit=tokens", "hardware.cuda_graphs=false") == 0


def test_vllm_plans_its_pool_before_it_captures_graphs():
    """41,408 slots were reported on an RTX 4090; with the graphs beside the pool there would be 28,000."""
    settings = ("hardware.gpu=RTX 4090", "speculation.algorithm=NONE", "model.context_len=8192")
    plan = assemble(load_scenario(None, [*settings, "hardware.server=vllm-0.9"])[0]).memory
    assert plan.graphs_bytes == 0 and plan.slots == pytest.approx(41_408, rel=0.04)


def test_tensor_parallelism_shards_weights_and_kv():
    target = lookup_model("llama-3.1-70b")
    four, eight = (kv_pool_slots(target, H100, tp) for tp in (4, 8))
    assert four.target_weights_bytes == pytest.approx(target.weight_bytes / 4, rel=1e-4)  # norms are whole
    assert four.target_slot_bytes == 2 * eight.target_slot_bytes == target.kv_bytes_per_token // 4
    # Sixteen devices for eight KV heads: each keeps one head.
    assert kv_pool_slots(target, H100, 16).target_slot_bytes == eight.target_slot_bytes


def test_a_slot_counts_the_layers_without_a_window():
    ((attention, layers),) = LLAMA.mixers
    windowed = replace(LLAMA, mixers=((attention, layers // 2), (replace(attention, window=128), layers // 2)))
    whole, few, many = (
        kv_pool_slots(shape, H100, max_batch_size=n) for shape, n in ((LLAMA, 8), (windowed, 8), (windowed, 4096))
    )
    assert few.target_slot_bytes == many.target_slot_bytes == whole.target_slot_bytes // 2
    assert 1.8 * whole.slots < many.slots < few.slots < 2.1 * whole.slots, "logits take memory of many requests alone"
    assert few.groups == many.groups == (KVGroup(window=128, pages=1.0),)
    alone = replace(LLAMA, mixers=((replace(attention, window=128), layers),))
    all_windowed = kv_pool_slots(alone, H100, max_batch_size=8)
    assert all_windowed.target_slot_bytes == whole.target_slot_bytes and not all_windowed.groups


def with_state(size):
    """Llama with a further layer that has a state of `size` bytes, and nothing else."""
    mixer = Recurrence(heads=2, key_dim=size // 8, value_dim=1, projected=0, output=0)
    return replace(LLAMA, mixers=(*LLAMA.mixers, (mixer, 1)))


def test_a_hybrid_model_keeps_a_state_per_request_and_per_node():
    state = 6 * MIB
    hybrid = with_state(state)
    options = {"max_batch_size": 8, "parallel": 2}
    for nodes, states in ((1, 8), (4, 8 * 5)):
        pure, plan = (kv_pool_slots(shape, H100, max_num_draft_tokens=nodes, **options) for shape in (LLAMA, hybrid))
        assert pure.recurrent_states_bytes == 0 and plan.recurrent_states_bytes == states * state // 2
        lost = (pure.slots - plan.slots) * plan.slot_bytes
        assert lost == pytest.approx(plan.recurrent_states_bytes, abs=plan.slot_bytes)
        rows = {name: value for name, value, *_ in plan.explain(CONFIG)}
        assert (
            rows["memory: recurrent_states"] == states * 3
            and len(plan.explain(CONFIG)) == len(pure.explain(CONFIG)) + 2
        )
    with pytest.raises(InsufficientMemory, match="recurrent_states"):
        kv_pool_slots(with_state(1 << 32), H100, max_batch_size=64)


def test_a_model_that_does_not_fit_says_what_it_needs():
    with pytest.raises(
        InsufficientMemory, match=r"70b does not fit on 1 × H100 .*target_weights 141.11 GB.*more devices"
    ):
        kv_pool_slots(lookup_model("llama-3.1-70b"), H100)


def test_the_last_two_pages_decide():
    plan = kv_pool_slots(LLAMA, H100, shares=MemoryShares(reserved=0.0))
    needed = sum(plan.terms().values()) - plan.kv_pool_bytes
    smallest = replace(H100, memory_bytes=needed + 2 * plan.slot_bytes)
    assert kv_pool_slots(LLAMA, smallest, shares=MemoryShares(reserved=0.0)).slots == 1
    with pytest.raises(InsufficientMemory):
        kv_pool_slots(
            LLAMA, replace(smallest, memory_bytes=smallest.memory_bytes - 1), shares=MemoryShares(reserved=0.0)
        )


def test_a_static_share_is_that_of_weights_and_pool():
    plan = kv_pool_slots(LLAMA, H100, shares=MemoryShares(static=0.7))
    terms = plan.terms()
    static = sum(terms[name] for name in ("target_weights", "draft_weights", "kv_pool"))
    assert static == pytest.approx(0.7 * (H100.memory_bytes - terms["context"]), abs=plan.slot_bytes)
    crowded = kv_pool_slots(LLAMA, H100, shares=MemoryShares(static=0.99))
    assert crowded.reserved_bytes == 0, "what activations and graphs need is taken from the pool"
    assert crowded == kv_pool_slots(LLAMA, H100, shares=MemoryShares(reserved=0.0))


def test_a_free_share_is_that_of_what_all_but_the_pool_leave():
    plan = kv_pool_slots(LLAMA, H100, shares=MemoryShares(free=0.9))
    terms = plan.terms()
    assert terms["kv_pool"] == pytest.approx(9 * terms["reserved"], abs=10 * plan.slot_bytes)


@pytest.mark.parametrize("bad", [{"page_size": 0}, {"max_prefill_tokens": 0}])
def test_impossible_limits_are_refused(bad):
    with pytest.raises(InsufficientMemory, match=next(iter(bad))):
        kv_pool_slots(LLAMA, H100, **bad)


@pytest.mark.parametrize("bad", [1.0, -0.1])
def test_an_impossible_share_is_refused(bad):
    with pytest.raises(InsufficientMemory, match=f"reserved share must be in .*{bad}"):
        MemoryShares(reserved=bad)
