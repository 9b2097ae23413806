"""The machine itself: its devices and versions, and whether the libraries work. These checks run before any check of
our own code."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from ...observe.children.cores import usable_cores
from ..measure.floor import copy_bandwidth
from ..measure.report import versions
from ..measure.run import device_name
from ..session.memory import free_bytes
from .forward import worst_of
from .steps import Context, SelftestStep, StepFinding

GIB = 1 << 30
OLDEST_CAPABILITY = (8, 0)  # of GPUs with bfloat16 in their tensor cores, which the kernels are compiled for
CPU_COPY_BYTES = 1 << 24


def machine_steps(context: Context) -> Iterator[SelftestStep]:
    yield SelftestStep("machine", "torch and Triton belong together", partial(pair, context), needs_gpu=True)
    yield SelftestStep("machine", "device, driver, versions", partial(facts, context))
    yield SelftestStep("machine", "memory bandwidth", partial(bandwidth, context))
    yield SelftestStep("machine", "matrix products", partial(products, context))
    yield SelftestStep("machine", "pinned memory, events, streams", partial(copies, context), needs_gpu=True)
    yield SelftestStep("machine", "a CUDA graph", partial(graph, context), needs_gpu=True)
    yield SelftestStep("machine", "Triton compiles and launches", partial(first_kernel, context), needs_gpu=True)


def pair(context: Context) -> StepFinding:
    """Check the first thing that goes wrong: torch brings up its CUDA, and Triton is the one that torch asks for."""
    torch.zeros(1, device=context.device)
    try:
        found, asked = (
            version("triton"),
            [one for one in requires("torch") or () if re.match(r"(pytorch-)?triton\b", one)],
        )
    except PackageNotFoundError as error:
        raise AssertionError(f"{error.name} is not installed as a package; the kernels need Triton") from None
    wanted = asked[0].partition(";")[0].strip() if asked else ""
    text = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {found}"
    assert not wanted or is_wanted(found, wanted), f"{text}; this torch asks for {wanted}: pip install '{wanted}'"
    return StepFinding(text + (f", as torch asks: {wanted}" if wanted else "; this torch asks for none"))


def is_wanted(found: str, wanted: str) -> bool:
    """Return whether a release is one of those of a requirement such as triton==3.6.0 or triton~=3.8.0; requirements of
    other forms hold."""
    match = re.search(r"([=~])=\s*(\d+(?:\.\d+)*)", wanted)
    if match is None:
        return True
    ours, theirs = (
        tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])) for text in (found, match[2])
    )
    if match[1] == "=":
        return ours[: len(theirs)] == theirs
    return ours >= theirs and ours[: len(theirs) - 1] == theirs[:-1]


def facts(context: Context) -> StepFinding:
    found = dict(versions())
    found["platform"] = platform.platform()
    found["device"] = device_name(context.device)
    found["free memory"] = f"{free_bytes(context.device) / GIB:.1f} GiB"
    if context.on_gpu:
        properties = torch.cuda.get_device_properties(context.device)
        capability = (properties.major, properties.minor)
        found |= {
            "compute capability": f"{capability[0]}.{capability[1]}",
            "processors": str(properties.multi_processor_count),
            "memory": f"{properties.total_memory / GIB:.1f} GiB",
            "driver and clocks": _nvidia_smi(),
        }
        assert capability >= OLDEST_CAPABILITY, f"compute capability {capability} is older than {OLDEST_CAPABILITY}"
    else:
        found["threads"] = f"{torch.get_num_threads()} of {usable_cores()} cores"
    return StepFinding(found["device"], tuple({"what": name, "found": value} for name, value in found.items()))


def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "nvidia-smi is not there"
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,persistence_mode"
    run = subprocess.run(
        [program, f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
    )
    return run.stdout.strip() or run.stderr.strip()


def bandwidth(context: Context) -> StepFinding:
    rate = copy_bandwidth(context.device, None if context.on_gpu else CPU_COPY_BYTES)
    return StepFinding(f"copies at {rate / 1e9:,.0f} GB/s, reads and writes together")


def products(context: Context) -> StepFinding:
    """Check the library's products in both dtypes:
    float32 must not be rounded to TF32, which would break every comparison."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in context.dtypes:
        for rows in (1, 4, 33):
            x, weight = (torch.randn(n, 256, generator=generator).to(dtype) for n in (rows, 384))
            found = torch.nn.functional.linear(x.to(context.device), weight.to(context.device) / 16)
            expected = torch.nn.functional.linear(x.double(), weight.double() / 16)
            worst = max(worst, worst_of([found], [expected]))
    return StepFinding(f"right; the greatest error is {worst:.0%} of what is allowed")


def copies(context: Context) -> StepFinding:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host = torch.arange(1 << 20, dtype=torch.int64).pin_memory()
    back = torch.empty_like(host, pin_memory=True)
    side = torch.cuda.Stream()
    begin.record()
    there = host.to(context.device, non_blocking=True) + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        back.copy_(there, non_blocking=True)
        end.record()
    end.synchronize()
    assert torch.equal(back, host + 1), "what came back is not what was sent"
    return StepFinding(f"8 MiB there and back in {begin.elapsed_time(end):.2f} ms")


def graph(context: Context) -> StepFinding:
    place = torch.zeros(64, 64, device=context.device)
    captured = torch.cuda.CUDAGraph()
    place @ place  # the library's workspace is made outside
    with torch.cuda.graph(captured, pool=torch.cuda.graph_pool_handle()):
        result = (place @ place).sum()
    place.fill_(1.0)
    captured.replay()
    assert float(result) == 64.0**3, f"a replay gave {float(result)}"
    return StepFinding("captured and replayed on other inputs")


def first_kernel(context: Context) -> StepFinding:
    buffer = torch.arange(24, dtype=torch.float32, device=context.device).view(6, 4)
    rows = torch.tensor([5, 2], device=context.device)
    (found,) = context.ops.relay_gather([buffer], rows)
    assert torch.equal(found, buffer[rows]), f"gathered {found.tolist()}"
    return StepFinding("a copying kernel is right")
