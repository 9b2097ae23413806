"""The half of `Ops` that builds, verifies and compacts trees, moves KV and relays values between steps."""

from __future__ import annotations

from .bonus import gather_emitted_torch, gather_emitted_triton
from .build_tree import build_chain_torch, build_chain_triton, build_tree_torch, build_tree_triton
from .coins import coins_torch, coins_triton
from .compact import compact_torch, compact_triton
from .duplicate_tails import duplicate_tails_torch_, duplicate_tails_triton_
from .move_kv import move_accepted_torch_, move_accepted_triton_, move_slots_torch_, move_slots_triton_
from .relay import relay_gather_torch, relay_gather_triton, relay_scatter_torch_, relay_scatter_triton_
from .verify_greedy import verify_greedy_torch, verify_greedy_triton
from .verify_sampling import verify_sampling_torch, verify_sampling_triton


class TorchBookkeeping:
    """The torch twins."""

    build_chain = staticmethod(build_chain_torch)
    build_tree = staticmethod(build_tree_torch)
    verify_greedy = staticmethod(verify_greedy_torch)
    verify_sampling = staticmethod(verify_sampling_torch)
    coins = staticmethod(coins_torch)
    gather_emitted = staticmethod(gather_emitted_torch)
    compact = staticmethod(compact_torch)
    move_accepted_ = staticmethod(move_accepted_torch_)
    move_slots_ = staticmethod(move_slots_torch_)
    duplicate_tails_ = staticmethod(duplicate_tails_torch_)
    relay_gather = staticmethod(relay_gather_torch)
    relay_scatter_ = staticmethod(relay_scatter_torch_)


class TritonBookkeeping:
    """The Triton kernels."""

    build_chain = staticmethod(build_chain_triton)
    build_tree = staticmethod(build_tree_triton)
    verify_greedy = staticmethod(verify_greedy_triton)
    verify_sampling = staticmethod(verify_sampling_triton)
    coins = staticmethod(coins_triton)
    gather_emitted = staticmethod(gather_emitted_triton)
    compact = staticmethod(compact_triton)
    move_accepted_ = staticmethod(move_accepted_triton_)
    move_slots_ = staticmethod(move_slots_triton_)
    duplicate_tails_ = staticmethod(duplicate_tails_triton_)
    relay_gather = staticmethod(relay_gather_triton)
    relay_scatter_ = staticmethod(relay_scatter_triton_)
