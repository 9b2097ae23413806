"""How a checkpoint's tensors lie inside the model's own, fused parameters."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..types.coded import CodedWeight
from .projection import Projection, WeightProduct


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """One tensor of a checkpoint: its published name, and the part of a parameter that holds it (a view, to copy into
    or from).

    The part holds what is published plus `offset`: Gemma publishes norms less 1, which 16 bits would round. `order`
    int64 [rows]: the published row at each of the part's rows, if they are others. `fused`: the rows of the tensors
    that the published one stacks.
    """

    name: str
    view: Tensor
    offset: float = 0.0
    order: Tensor | None = None
    fused: tuple[int, ...] | None = None

    def fill(self, published: Tensor) -> None:
        self.view.copy_(published if self.order is None else published[self.order])
        if self.offset:
            self.view.add_(self.offset)

    def arranged(self, published: CodedWeight) -> CodedWeight:
        """Return a published matrix with its rows in the order of the part."""
        return published if self.order is None else published.rows(self.order)

    def published(self) -> Tensor:
        """Return a copy on the CPU, as a checkpoint has it."""
        ours = (self.view.detach() - self.offset).cpu() if self.offset else self.view.detach().cpu().clone()
        return ours if self.order is None else torch.empty_like(ours).index_copy_(0, self.order, ours)


def empty_weight(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter; frozen until a trainer calls `requires_grad_`."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def empty_matrix(*shape: int, device: torch.device | str, dtype: torch.dtype, kept: bool) -> nn.Parameter:
    """Return an uninitialised matrix that nothing but a product reads.

    `kept`: the product may keep it in the numbers of its checkpoint, so the parameter has a shape and no memory until
    `allocate` gives it some.
    """
    if not kept:
        return empty_weight(*shape, device=device, dtype=dtype)
    return nn.Parameter(torch.full((), torch.nan, device=device, dtype=dtype).expand(shape), requires_grad=False)


def allocate(parameter: Tensor) -> None:
    """Give a parameter of `empty_matrix` its memory. Views of it that were made before have none."""
    parameter.data = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)


def products_of(model: nn.Module) -> Iterator[WeightProduct]:
    """Yield the products with the model's matrices, experts' included."""
    for module in model.modules():
        yield from getattr(module, "projections", ())
        yield from getattr(module, "expert_projections", ())


def round_when_filled(model: nn.Module, weights: Iterable[NamedWeight]) -> Callable[[NamedWeight], None]:
    """Return a function to be called with each of a model's `weights` once it is filled. On a CPU it rounds a large
    matrix of a layer to 8-bit integers as soon as all parts of it are there, so that one layer at a time has floats."""
    in_layers = [one for module in model.modules() if module is not model for one in getattr(module, "projections", ())]
    products: dict[int, Projection] = {one.parameter.untyped_storage().data_ptr(): one for one in in_layers}
    left = Counter(weight.view.untyped_storage().data_ptr() for weight in weights)

    def filled(weight: NamedWeight) -> None:
        place = weight.view.untyped_storage().data_ptr()
        left[place] -= 1
        if not left[place] and place in products:
            products[place].pack(in_int8=True)
            give_back(0)

    give_back = getattr(ctypes.CDLL(None), "malloc_trim", id)  # glibc keeps what is freed within its heap
    return filled


def rows_of(
    parameter: Tensor,
    sizes: dict[str, int],
    suffix: str,
    order: Tensor | None = None,
    fused: tuple[int, ...] | None = None,
) -> Iterator[NamedWeight]:
    """Yield the tensors that a parameter stacks along its first axis: `sizes` names them, with their rows, in order.

    `order` int64 [rows of the parameter]: see `NamedWeight`; no row stands in another tensor than its published one.
    `fused`: see there, too.
    """
    first = 0
    for name, size in sizes.items():
        part = None if order is None else order[first : first + size] - first
        yield NamedWeight(f"{name}.{suffix}", parameter.detach()[first : first + size], order=part, fused=fused)
        first += size
    assert first == parameter.shape[0], f"{first} rows named of {parameter.shape[0]}"


def initialize(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Draw random weights: matrices and biases normal with deviation `std`, norms and scalars of layers 1, without
    touching torch's own generators. Matrices that are kept in stored numbers have no others."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.untyped_storage().nbytes() < parameter.nbytes:
                continue
            if "norm" in name or name.endswith("layer_scalar"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)


def weight_bytes(model: nn.Module) -> int:
    """Return bytes of all weights that the model itself owns, in the numbers that products read. Of embeddings that are
    the LM head, too, only the head's numbers are counted."""
    multiplied = {id(one.parameter): one.nbytes for one in products_of(model)}
    return sum(multiplied.get(id(parameter), parameter.nbytes) for parameter in model.parameters())
