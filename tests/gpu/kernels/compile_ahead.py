"""Compile kernels for a GPU that is not there, and read from the machine code what they would cost there.

`python compile_ahead.py 90` compiles one case of each kernel for that architecture, `python compile_ahead.py 90 all`
every case, and prints one JSON object for each. `python compile_ahead.py gfx950` compiles one case of each for a GPU of
AMD, in Ampere's blocks, and prints its name. It is a process of its own because interpreting and compiling cannot
share one.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from ahead_cases import CASES, AotCase
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Instructions of the tensor cores: mma.sync, Hopper's wgmma, Blackwell's tcgen05.
TENSOR_CORES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|OMMA)\b")


@dataclass(frozen=True)
class Compiled:
    """`stack` and `local` are bytes per thread; more than none means that registers were spilled."""

    registers: int
    stack: int
    local: int
    shared_bytes: int
    tensor_instructions: list[str]


def cases_for(architecture: int) -> list[tuple[str, AotCase]]:
    """(file of the kernel, case) of every case for the architecture."""
    return [
        (case.kernel.fn.__module__.rpartition(".")[2], case) for case in CASES if architecture in case.architectures
    ]


def one_of_each(cases: list[tuple[str, AotCase]]) -> list[tuple[str, AotCase]]:
    """The first case of each kernel."""
    first = {}
    for name, case in cases:
        first.setdefault(id(case.kernel), (name, case))
    return list(first.values())


@functools.cache
def tool(name: str) -> str:
    """A program that comes with Triton's wheel."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def source_of(case: AotCase) -> ASTSource:
    types, parameters = case.signature, list(case.kernel.arg_names)
    assert types.keys() | case.constexprs.keys() == set(parameters), f"{case.name}: the signature is not the kernel's"
    signature = {name: types.get(name, "constexpr") for name in parameters}
    divisible = case.divisible_by_16.split()
    aligned = [(i,) for i, name in enumerate(parameters) if signature[name].startswith("*") or name in divisible]
    return ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constexprs),
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )


def compile_for_amd(architecture: str) -> None:
    """Compile one case of each kernel, to see that it can be; the pipelines have two stages."""
    for kernel_file, case in one_of_each(cases_for(80)):
        options = {"num_warps": case.num_warps, "num_stages": min(case.num_stages, 2), **case.options}
        triton.compile(source_of(case), target=GPUTarget("hip", architecture, 64), options=options)
        print(json.dumps({"file": kernel_file, "name": case.name}), flush=True)


def compile_case(case: AotCase, architecture: int) -> Compiled:
    """Compile for one compute capability (80, 90, 100); Triton caches what it has compiled before."""
    compiled = triton.compile(
        source_of(case),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tool("cuobjdump"), "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
        code = ""
        if case.tensor_cores:  # only then are the instructions looked at, and disassembling takes most of the time
            disassemble = [tool("nvdisasm"), "-c", cubin.name]
            code = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
    # The line also tells of an empty fatbinary section; the kernel's own has REG.
    registers, stack, local = (
        max(int(value) for value in re.findall(rf"\b{word}:(\d+)", usage)) for word in ("REG", "STACK", "LOCAL")
    )
    return Compiled(registers, stack, local, compiled.metadata.shared, sorted(set(TENSOR_CORES.findall(code))))


if __name__ == "__main__":
    if sys.argv[1].startswith("gfx"):
        compile_for_amd(sys.argv[1])
        sys.exit()
    wanted = int(sys.argv[1])
    cases = cases_for(wanted)
    for kernel_file, aot_case in cases if "all" in sys.argv else one_of_each(cases):
        result = compile_case(aot_case, wanted)
        print(
            json.dumps(
                {
                    "file": kernel_file,
                    "name": aot_case.name,
                    "must_use_tensor_cores": aot_case.tensor_cores,
                    "may_spill": aot_case.may_spill,
                    "num_warps": aot_case.num_warps,
                    **asdict(result),
                }
            ),
            flush=True,
        )
