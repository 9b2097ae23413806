"""The launches of a decode round, as the executor makes them, counted without a GPU.

A captured round runs on the meta device, whose tensors have shapes and no memory. Triton's launches and torch's
operators are written down instead of computed. So kernels, graphs, relay cells and the sizes that a GPU's processors
decide are those of a real round. Copies between host and device are left out: they run beside the round before.

An operator counts as one launch, though torch needs several for a sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import ForedraftError
from ..gpu.executor.build import build_executor
from ..gpu.executor.executor import TorchExecutor
from ..gpu.executor.graphs import RoundKind, no_masks
from ..gpu.executor.parts import DraftModel, ExecutorOptions
from ..gpu.kernels.jit import recorded
from ..gpu.kernels.layers.decode_attention import decode_attention_bytes
from ..gpu.kernels.layers.flash import DeviceTraits, assumed_traits
from ..gpu.kernels.layers.verify_attention import verify_attention_bytes
from ..gpu.measure.plan import ArmPlan, BenchPlan
from ..gpu.measure.shapes import meta_models
from ..gpu.models.decoder import Decoder
from ..gpu.models.weights import products_of
from ..gpu.ops.triton_ops import TritonOps
from ..gpu.types.shards import EXCHANGES, GATHER, SUM

PROJECTIONS, EXPERTS, ATTENTION, LM_HEAD = "projections", "experts", "attention", "LM head"
ELEMENTWISE, RECURRENT, REST = "norms, rotation, activation", "recurrent states", "everything else"
EXCHANGED = {SUM: "sums of all ranks", GATHER: "logits of all ranks"}
GROUPS = (PROJECTIONS, EXPERTS, ATTENTION, RECURRENT, ELEMENTWISE, LM_HEAD, REST, *EXCHANGED.values())
TARGET, DRAFT = "target", "draft"

_ATTENTION = ("verify_attention_kernel", "decode_attention_kernel", "join_parts_kernel")
_OF_LAYERS = ("rms_norm_kernel", "rope_write_kernel", "gate_mul_kernel")
_OF_STATES = ("delta_nodes_kernel", "delta_keep_kernel")
_OF_EXPERTS = ("route_kernel", "combine_kernel")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_READ_ROWS = ("embedding", "index", "index_select", "gather", "take")  # of what is read, only what comes out
_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "scalar_tensor", "_unsafe_view", "detach", "alias")


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of a round. `model` and `group` say which part of it; `product` is (groups, rows, inner, columns) of a
    matrix product."""

    model: str  # TARGET, DRAFT, or "" for what belongs to none
    group: str  # one of GROUPS
    name: str
    num_bytes: int  # that it must move; of an exchange, those that the rank must send
    product: tuple[int, int, int, int] | None = None
    weight_bytes: float = 2.0  # of a product: the bytes of one weight, with its share of scales


def count_launches(plan: BenchPlan, arm: ArmPlan, context_len: int, traits: DeviceTraits) -> list[KernelLaunch]:
    """Return the launches of a greedy round of `arm` on a GPU with these traits, with `context_len` tokens of KV per
    row.

    `plan` is one for the device "meta". With tensor parallelism the launches are those of one rank, each exchange among
    them. Raises ForedraftError for rounds without a graph, and without Triton.
    """
    ops: Any = TritonOps()
    target, draft = meta_models(
        plan.target, plan.draft if arm.steps else None, plan.dtype, ops, plan.part, plan.kv_dtype
    )
    engine = arm.spec.make_engine(lambda event: None)
    options = ExecutorOptions(graph_sizes=arm.spec.graph_sizes, graph_outputs=False)
    executor = build_executor(engine, target, draft, ops, options)
    batch_size = arm.spec.config.max_running
    graph = executor.graphs.find(arm.spec.largest_round, batch_size, RoundKind.GREEDY)
    if graph is None:
        raise ForedraftError(f"{arm.spec.algorithm}: launches are counted of captured rounds, and these are not")
    recorder = _Recorder(executor, target, draft, context_len)
    token, listener = assumed_traits.set(traits), EXCHANGES.on_exchange
    try:
        with torch.no_grad(), recorded(recorder.kernel):
            graph.replay(no_masks)  # makes the constants, as a graph's warm-up does
            recorder.launches.clear()
            EXCHANGES.on_exchange = recorder.exchange
            with recorder:
                graph.replay(no_masks)
    finally:
        EXCHANGES.on_exchange = listener
        assumed_traits.reset(token)
    return recorder.launches


class _Recorder(TorchDispatchMode):
    """Writes launches down. A launch belongs to the model whose weights or pool it reads; one that reads neither, to
    the model of the launch before if layers have such kernels."""

    def __init__(self, executor: TorchExecutor, target: Decoder, draft: DraftModel | None, context_len: int) -> None:
        super().__init__()
        self.launches: list[KernelLaunch] = []
        self._context_len = context_len
        self._ranks = target.shard.size
        self._model = TARGET
        models: dict[str, nn.Module] = {TARGET: target, **({} if draft is None else {DRAFT: draft})}
        self._weights = {
            _memory(weight): (model, name)
            for model, module in models.items()
            for name, weight in module.named_parameters()
        }
        for model, module in models.items():
            for number, product in enumerate(products_of(module)):
                if product.coded is not None:
                    parts = (product.coded.codes, product.coded.scales, product.coded.zeros, product.coded.factors)
                    self._weights |= {_memory(x): (model, f"coded {number}") for x in parts if x is not None}
        pools = {TARGET: executor.pool, **({} if executor.draft_pool is None else {DRAFT: executor.draft_pool})}
        self._pools = {_memory(x): model for model, pool in pools.items() for x in pool.all_layers}
        tables = [x for module in models.values() for x in _tables(module)]
        resident = chain(executor.future_map.buffers.values(), tables)
        self._resident = {_memory(x) for x in resident} | self._pools.keys()

    def kernel(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Write down a launch of Triton."""
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        owner = self._owner(tensors)
        if name in _ATTENTION:
            num_bytes = self._attention_bytes(name, arguments) if "k_pool" in arguments else self._moved(tensors)
            self._add(owner or self._model, ATTENTION, name, num_bytes)
        elif name in ("coded_product_kernel", "expert_product_kernel"):
            self._stored_product(name, arguments)
        elif name in _OF_EXPERTS:
            self._add(owner or self._model, EXPERTS, name, self._moved(tensors))
        elif name in _OF_STATES:
            self._add(self._model, RECURRENT, name, self._state_bytes(name, arguments, tensors))
        elif name in _OF_LAYERS or owner is not None:
            self._add(owner or self._model, ELEMENTWISE, name, self._moved(tensors))
        else:
            self._add("", REST, name, self._moved(tensors))

    def exchange(self, kind: str, num_bytes: int) -> None:
        """Write down an exchange. In a ring a rank sends (N - 1) / N of what is gathered, and twice of what is summed:
        the parts, and the sums."""
        ways = 2 if kind == SUM else 1
        self.launches.append(
            KernelLaunch("", EXCHANGED[kind], kind, ways * num_bytes * (self._ranks - 1) // self._ranks)
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in _ALLOCATE:
            return result
        outputs = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)]
        inputs = [x for x in chain.from_iterable(_flat(arg) for arg in args) if isinstance(x, Tensor)]
        if name in _PRODUCTS:
            self._product(name, inputs[-2], inputs[-1], outputs[0])
        elif name in _READ_ROWS:
            model, weight = self._weights.get(_memory(inputs[0]), ("", "embed_weight"))
            part = ("", REST) if weight == "embed_weight" else (model, EXPERTS)  # copied for a product
            self._add(*part, name, 2 * self._moved(outputs))
        else:
            self._add("", REST, name, self._moved([*inputs, *outputs]))
        return result

    def _product(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        found = self._weights.get(_memory(weight))
        rows, inner, columns = out.shape[-2], x.shape[-1], out.shape[-1]
        product = (out.shape[0] if out.ndim == 3 else 1, rows, inner, columns)
        group = REST
        if found is not None:
            is_head = found[1] in ("lm_head_weight", "embed_weight")
            # A head without embeddings of its own multiplies by its target's.
            self._model = self._model if is_head else found[0]
            group = LM_HEAD if is_head else PROJECTIONS if out.ndim == 2 else EXPERTS
        elif out.ndim == 3:
            group = EXPERTS  # gathered
        self._add(self._model if group != REST else "", group, name, self._moved([x, weight, out]), product)

    def _stored_product(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Write down a product of Triton's: with a matrix in stored numbers, or with those of chosen experts. Of these
        as many are read as there are choices, and no more than exist."""
        x, out, experts = arguments["x"], arguments["out"], arguments.get("experts")
        inner = x.shape[-1] // (2 if arguments.get("GATED") else 1)
        parts = [arguments[part] for part in ("codes", "scales", "zeros", "factors") if arguments[part] is not None]
        stored = sum(part.nbytes for part in parts)
        group, choices, rows, count = PROJECTIONS, 1, len(x), 1
        if experts is not None:
            group, choices, rows, count = EXPERTS, experts.numel(), 1, len(parts[0])
        weight_bytes = stored / (count * inner * out.shape[-1])
        read = stored * min(choices, count) // count
        product = (choices, rows, inner, out.shape[-1])
        self._add(self._owner(parts) or self._model, group, name, read + self._moved([x, out]), product, weight_bytes)

    def _owner(self, tensors: Iterable[Tensor]) -> str | None:
        for x in tensors:
            if (memory := _memory(x)) in self._pools:
                return self._pools[memory]
            if memory in self._weights:
                return self._weights[memory][0]
        return None

    def _attention_bytes(self, name: str, arguments: Mapping[str, Any]) -> int:
        q, pool = arguments["q"], arguments["k_pool"]
        _, heads, d = q.shape
        length = min(self._context_len, arguments["WINDOW"] or self._context_len)
        shape = (heads, pool.shape[1], d, q.dtype.itemsize, pool.dtype.itemsize)
        parts = self._moved([arguments["partial"], arguments["lse"]]) if arguments["JOIN"] else 0
        if name == "decode_attention_kernel":
            return parts + decode_attention_bytes([length] * len(q), *shape)
        rows = len(arguments["rows"])
        return parts + verify_attention_bytes([length] * rows, len(q) // rows, *shape)

    def _state_bytes(self, name: str, arguments: Mapping[str, Any], tensors: list[Tensor]) -> int:
        """Return the bytes of the rows' states, read once by the nodes, read and written where paths are kept, and of
        the other tensors."""
        pools, keeps = (arguments["matrices"], arguments["history"]), name == "delta_keep_kernel"
        of_rows: int = sum(x.nbytes // x.shape[keeps] for x in pools) * len(arguments["rows"])
        others = [x for x in tensors if all(x is not pool for pool in pools)]
        return of_rows * (2 if keeps else 1) + self._moved(others)

    def _moved(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of different tensors, without those of which a kernel reads some rows."""
        seen = {(_memory(x), x.storage_offset(), x.shape): x for x in tensors if _memory(x) not in self._resident}
        return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in seen.values())

    def _add(
        self,
        model: str,
        group: str,
        name: str,
        num_bytes: int,
        product: tuple[int, int, int, int] | None = None,
        weight_bytes: float = 2.0,
    ) -> None:
        self._model = model or self._model
        self.launches.append(KernelLaunch(model, group, name, num_bytes, product, weight_bytes))


def _memory(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address


def _flat(argument: Any) -> Iterable[Any]:
    return argument if isinstance(argument, tuple | list) else (argument,)


def _tables(module: nn.Module) -> list[Tensor]:
    """Return the rotary tables of a model and of its layers."""
    found = [getattr(part, name, None) for part in module.modules() for name in ("cos_sin", "table", "_table")]
    return [x for x in found if isinstance(x, Tensor)]
