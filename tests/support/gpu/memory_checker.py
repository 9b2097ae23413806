"""Every memory access of interpreted Triton kernels, checked against the tensors that were passed to the launch.

The interpreter (TRITON_INTERPRET=1) executes a kernel with NumPy and loads from raw addresses without looking at them.
Four of its methods see all addresses and masks: `checked_memory` wraps them for the length of a `with` block and raises
`MemoryFault` for

* `outside`: an access that is inside no tensor of the launch (a negative index, a masked-out end, a gap between a
  view's rows),
* `read-only`: a store to a tensor that the test calls an input,
* `unwritten`: a load of memory that was allocated empty and that nothing has written since,
* `double store`: two programs, or two lanes of one store, write different things to one address,
* `race`: a program reads what another one of the same launch writes, without an atomic between them that orders the two
  (release and acquire of one address),
* `foreign`: a program touches a part of a pool that belongs to another row.

Programs of a grid run one after the other there, so that what depends on their order passes unseen: `shuffle` runs them
in another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

CANARY = 0xFF  # as bytes: NaN in every float type, −1 in every integer type
NO_PROGRAM, SEVERAL = -1, -2


class MemoryFault(AssertionError):
    """`kind` is one of the words in the module's description."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind}: {self.args[1]}"


@dataclass(frozen=True)
class Ownership:
    """Entry i of the pool's axis belongs to row owners[i]; 0 belongs to everybody.
    row_of(x, y, z) names the program's row."""

    pool: Tensor
    owners: Sequence[int]
    row_of: Callable[[int, int, int], int]
    axis: int = 0


@dataclass
class Memory:
    """One storage: what may be touched, byte by byte, and who has touched it in this launch (numbers of programs)."""

    storage: torch.UntypedStorage
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start, self.size = self.storage.data_ptr(), self.storage.nbytes()
        self.allowed = np.zeros(self.size, dtype=bool)
        self.read_only = np.zeros(self.size, dtype=bool)
        self.shared = np.zeros(self.size, dtype=bool)
        self.owners = np.zeros(self.size, dtype=np.int64)
        self.row_of: Callable[[int, int, int], int] | None = None
        self.writers = np.full(self.size, NO_PROGRAM, dtype=np.int64)
        self.readers = np.full(self.size, NO_PROGRAM, dtype=np.int64)


def bytes_of(flags: np.ndarray, tensor: Tensor) -> Tensor:
    """The part of a storage's array of one entry per byte that a tensor's elements occupy: [*shape, itemsize]."""
    item = tensor.element_size()
    return torch.as_strided(
        torch.from_numpy(flags),
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.stride()), 1),
        tensor.storage_offset() * item,
    )


class Checker:
    """What `checked_memory` yields; `launches` and `accesses` count what was seen, so that a test can tell
    that something was."""

    def __init__(
        self,
        within: Sequence[Tensor],
        read_only: Sequence[Tensor],
        sinks: Sequence[Tensor],
        ownership: Sequence[Ownership],
        shuffle: int | None,
    ) -> None:
        self.within, self.read_only, self.sinks, self.ownership = within, read_only, sinks, ownership
        self.random = None if shuffle is None else random.Random(shuffle)
        self.launches = 0
        self.accesses = 0
        self.kernel = ""
        self.program = (0, 0, 0)
        self.number = 0  # of the program, or of what a program does behind an atomic
        self.visible: set[int] = set()  # numbers whose accesses come before
        self.released: dict[int, set[int]] = {}  # by address of an atomic: what is visible behind it
        self.num_numbers = 0
        self.memories: list[Memory] = []
        self.starts = np.empty(0, dtype=np.int64)
        self.unwritten: dict[int, tuple[torch.UntypedStorage, np.ndarray]] = {}
        self.order: list[tuple[int, int, int]] = []

    # -- what is known of memory --------------------------------------------------------------------------------------

    def allocated(self, tensor: Tensor) -> Tensor:
        """A tensor that was allocated empty: nothing has written it."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            everything = torch.empty(0, dtype=torch.uint8).set_(storage)
            everything.fill_(CANARY)
            self.unwritten[storage.data_ptr()] = (storage, np.ones(storage.nbytes(), dtype=bool))
        return tensor

    def unwrite(self, tensor: Tensor) -> None:
        """Forget that anything was ever written to this part of a pool."""
        storage = tensor.untyped_storage()
        _, flags = self.unwritten.setdefault(storage.data_ptr(), (storage, np.zeros(storage.nbytes(), dtype=bool)))
        bytes_of(flags, tensor).fill_(True)
        tensor.view(torch.uint8).fill_(CANARY)

    def begin(self, kernel: str, tensors: dict[str, Tensor]) -> None:
        """A launch with these tensors."""
        self.launches += 1
        self.kernel = kernel
        found: dict[int, Memory] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            memory = found.setdefault(storage.data_ptr(), Memory(storage))
            memory.names.append(name)
            inside = [view for view in self.within if view.untyped_storage().data_ptr() == memory.start]
            for view in inside or [tensor]:
                bytes_of(memory.allowed, view).fill_(True)
        for what, views in (("read_only", self.read_only), ("shared", self.sinks)):
            for view in views:
                if (memory := found.get(view.untyped_storage().data_ptr())) is not None:
                    bytes_of(getattr(memory, what), view).fill_(True)
        for rule in self.ownership:
            if (memory := found.get(rule.pool.untyped_storage().data_ptr())) is not None:
                owners = torch.as_tensor(rule.owners, dtype=torch.int64)
                shape = [1] * (rule.pool.dim() + 1)
                shape[rule.axis] = -1
                bytes_of(memory.owners, rule.pool).copy_(owners.view(shape))
                memory.row_of = rule.row_of
        self.memories = sorted(found.values(), key=lambda memory: memory.start)
        self.starts = np.array([memory.start for memory in self.memories], dtype=np.int64)

    def grid(self, x: int, y: int, z: int) -> None:
        self.order = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        self.num_numbers, self.released = len(self.order), {}
        self.dims = (x, y, z)
        if self.random is not None:
            self.random.shuffle(self.order)

    def enter(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """The program that runs when the interpreter calls for (x, y, z)."""
        self.number = (x * self.dims[1] + y) * self.dims[2] + z
        self.program, self.visible = self.order[self.number], {self.number}
        return self.program

    def concurrent(self, numbers: np.ndarray) -> bool:
        """Whether one of these accesses is another program's that nothing orders before this one."""
        others = numbers[(numbers != NO_PROGRAM) & (numbers != self.number)]
        return bool(others.size) and not np.isin(others, list(self.visible)).all()

    # -- accesses -----------------------------------------------------------------------------------------------------

    def fault(self, kind: str, message: str) -> MemoryFault:
        return MemoryFault(kind, f"{self.kernel}, program {self.program}: {message}")

    def parts(
        self, pointers: np.ndarray, mask: np.ndarray, item: int
    ) -> Iterator[tuple[Memory, np.ndarray, np.ndarray]]:
        """Live lanes by storage: (memory, byte offsets, lane numbers)."""
        live = np.flatnonzero(np.broadcast_to(mask, pointers.shape))
        addresses = pointers.reshape(-1)[live].astype(np.int64)
        self.accesses += len(live)
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        for index in np.unique(which):
            lanes = which == index
            if index < 0:
                raise self.fault("outside", f"{lanes.sum()} lanes below every tensor of the launch")
            memory = self.memories[index]
            offsets = addresses[lanes] - memory.start
            inside = offsets + item <= memory.size
            inside[inside] = memory.allowed[offsets[inside]] & memory.allowed[offsets[inside] + item - 1]
            if not inside.all():
                wrong = int(offsets[~inside][0])
                raise self.fault(
                    "outside",
                    f"byte {wrong} of {memory.size} is in none of its views ({', '.join(memory.names)} end nearest below)",
                )
            yield memory, offsets, live[lanes]

    def foreign(self, memory: Memory, offsets: np.ndarray) -> None:
        if memory.row_of is None:
            return
        owners, mine = memory.owners[offsets], memory.row_of(*self.program)
        wrong = (owners != 0) & (owners != mine)
        if wrong.any():
            raise self.fault(
                "foreign", f"row {mine} touches what belongs to row {owners[wrong][0]} ({', '.join(memory.names)})"
            )

    def load(self, pointers: np.ndarray, mask: np.ndarray, item: int) -> None:
        for memory, offsets, _ in self.parts(pointers, mask, item):
            self.foreign(memory, offsets)
            _, empty = self.unwritten.get(memory.start, (None, None))
            if empty is not None and (candidates := offsets[empty[offsets]]).size:
                # What torch wrote since the allocation has no flag of its own, but the canary is gone.
                content = np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(memory.start))
                bare = (content[candidates[:, None] + np.arange(item)] == CANARY).all(1)
                if bare.any():
                    raise self.fault("unwritten", f"byte {candidates[bare][0]} of {', '.join(memory.names)}")
            private = offsets[~memory.shared[offsets]]
            if self.concurrent(memory.writers[private]):
                raise self.fault("race", f"reads what another program wrote ({', '.join(memory.names)})")
            seen = memory.readers[private]
            memory.readers[private] = np.where((seen == NO_PROGRAM) | (seen == self.number), self.number, SEVERAL)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray, item: int) -> None:
        flat = np.broadcast_to(values, pointers.shape).reshape(-1)
        for memory, offsets, lanes in self.parts(pointers, mask, item):
            self.written(memory, offsets, item)
            private = ~memory.shared[offsets]
            offsets, lanes = offsets[private], lanes[private]
            if self.concurrent(memory.writers[offsets]):
                raise self.fault("double store", f"two programs store to one address of {', '.join(memory.names)}")
            if self.concurrent(memory.readers[offsets]):
                raise self.fault("race", f"stores to what another program read ({', '.join(memory.names)})")
            by_address = np.argsort(offsets, kind="stable")
            near, stored = offsets[by_address], flat[lanes[by_address]].view(f"V{flat.itemsize}")
            if ((near[1:] == near[:-1]) & (stored[1:] != stored[:-1])).any():
                raise self.fault("double store", f"two lanes store to one address of {', '.join(memory.names)}")
            memory.writers[offsets] = self.number
            for address in self.released.keys() & set((memory.start + offsets).tolist()):
                del self.released[address]

    def atomic(self, pointers: np.ndarray, mask: np.ndarray, item: int) -> None:
        """Atomics may meet each other at an address. What a program did before comes before what another one does
        behind its next atomic there."""
        acquired: set[int] = set()
        for memory, offsets, _ in self.parts(pointers, mask, item):
            self.written(memory, offsets, item)
            addresses = (memory.start + offsets).tolist()
            plain = np.array([address not in self.released for address in addresses], dtype=bool)
            if self.concurrent(memory.writers[offsets[plain]]):
                raise self.fault("race", f"an atomic meets another program's store ({', '.join(memory.names)})")
            memory.writers[offsets] = self.number
            for address in addresses:
                before = self.released.get(address, set())
                acquired |= before
                self.released[address] = before | self.visible
        self.number, self.num_numbers = self.num_numbers, self.num_numbers + 1
        self.visible = self.visible | acquired | {self.number}

    def written(self, memory: Memory, offsets: np.ndarray, item: int) -> None:
        self.foreign(memory, offsets)
        if memory.read_only[offsets].any():
            raise self.fault("read-only", f"stores to an input ({', '.join(memory.names)})")
        _, empty = self.unwritten.get(memory.start, (None, None))
        if empty is not None:
            empty[offsets[:, None] + np.arange(item)] = False


@contextlib.contextmanager
def checked_memory(
    *,
    within: Sequence[Tensor] = (),
    read_only: Sequence[Tensor] = (),
    sinks: Sequence[Tensor] = (),
    ownership: Sequence[Ownership] = (),
    shuffle: int | None = None,
) -> Iterator[Checker]:
    """Check the launches of a block. Every tensor of a launch may be touched, in its own elements.

    within     a launch tensor that shares storage with one of these may be touched only inside these
    read_only  views that no kernel may store to
    sinks      views that any number of programs may read and write (slot 0 of a pool, cell 0 of a relay)
    ownership  pools whose parts belong to rows
    shuffle    a seed: run the programs of each grid in another order
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "the checker sees only interpreted kernels"
    from triton.runtime import interpreter

    checker = Checker(within, read_only, sinks, ownership, shuffle)
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    with contextlib.ExitStack() as undo:

        def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            setattr(owner, name, make(original))
            undo.callback(setattr, owner, name, original)

        _wrap_accesses(checker, builder, wrap)
        wrap(executor, "__call__", lambda original: _checked_launch(checker, original))
        for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (Tensor, ("new_empty",))):
            for name in names:
                wrap(owner, name, lambda original: lambda *a, **k: checker.allocated(original(*a, **k)))
        yield checker


def _wrap_accesses(checker: Checker, builder: Any, wrap: Callable[..., None]) -> None:
    """Look at addresses and masks before the interpreter uses them."""

    def item_of(pointer: Any) -> int:
        return max(pointer.get_element_ty().primitive_bitwidth // 8, 1)

    def load(original: Any) -> Any:
        def checked(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            checker.load(ptrs.data, mask.data, item_of(ptrs))
            return original(self, ptrs, mask, *rest, **named)

        return checked

    def store(original: Any) -> Any:
        def checked(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            checker.store(ptrs.data, value.data, mask.data, item_of(ptrs))
            return original(self, ptrs, value, mask, *rest, **named)

        return checked

    def rmw(original: Any) -> Any:
        def checked(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            checker.atomic(ptr.data, mask.data, item_of(ptr))
            return original(self, op, ptr, val, mask, *rest, **named)

        return checked

    def cas(original: Any) -> Any:
        def checked(self: Any, ptr: Any, *rest: Any, **named: Any) -> Any:
            checker.atomic(ptr.data, np.ones(ptr.data.shape, dtype=bool), item_of(ptr))
            return original(self, ptr, *rest, **named)

        return checked

    def grid_idx(original: Any) -> Any:
        return lambda self, x, y, z: original(self, *checker.enter(x, y, z))

    def grid_dim(original: Any) -> Any:
        def checked(self: Any, x: int, y: int, z: int) -> None:
            checker.grid(x, y, z)
            original(self, x, y, z)

        return checked

    wrap(builder, "create_masked_load", load)
    wrap(builder, "create_masked_store", store)
    wrap(builder, "create_atomic_rmw", rmw)
    wrap(builder, "create_atomic_cas", cas)
    wrap(builder, "set_grid_idx", grid_idx)
    wrap(builder, "set_grid_dim", grid_dim)


def _checked_launch(checker: Checker, original: Any) -> Any:
    """A launch whose tensors the checker knows, and whose fault comes out bare:
    the interpreter wraps what a kernel raises."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        checker.begin(
            getattr(self.fn, "__name__", "kernel"), {name: t for name, t in named.items() if isinstance(t, Tensor)}
        )
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MemoryFault):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    return launch
