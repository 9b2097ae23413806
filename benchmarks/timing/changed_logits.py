"""The time that changed logits cost a node on a CPU, with tokens counted once per round and with the text read at each
node.

    python benchmarks/timing/changed_logits.py

One row with a penalty of each kind, a text of 500 and of 32,000 tokens that differ, and a chain of 4 nodes; median of
60 calls of each way, which take turns in one process and thread. "Text": counts in a dictionary, copied for each node
with the path's tokens added, and tensors made of it. The filters: the probabilities of four nodes with and without
them, in processor time, by the kernel that Numba compiles and by torch's operations.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.contract.step import Join
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.shaping import Shaping, paths_of
from foredraft.gpu.kernels import host
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.types.ops import DeviceTree
from torch import Tensor

OPS, VOCAB, NODES, CALLS, DEVICE = TorchOps(), 151_936, 4, 60, torch.device("cpu")
ASKED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.3)


def by_text(logits: Tensor, tree: DeviceTree, prompt: dict[int, None], counts: dict[int, int]) -> Tensor:
    """Return the changed logits [nd, V], from the text's tokens at each node."""
    out = logits.clone()
    for node, path in enumerate(paths_of(tree.tokens[0].tolist(), tree.parents[0].tolist())):
        here = dict(counts)
        for token in path:
            here[token] = here.get(token, 0) + 1
        seen = torch.tensor(list({**prompt, **here}))
        values = out[node, seen]
        penalty = ASKED.repetition_penalty
        out[node, seen] = torch.where(values > 0, values / penalty, values * penalty)
        emitted, times = torch.tensor(list(here)), torch.tensor(list(here.values()), dtype=out.dtype)
        out[node, emitted] -= ASKED.frequency_penalty * times + ASKED.presence_penalty
    return out


def compare(length: int) -> str:
    """Return a line with the milliseconds of both ways for one node, and their ratio."""
    rng = np.random.default_rng(1)
    text = rng.permutation(VOCAB)[:length]
    prompt, output = np.split(text, [length // 2])
    shaping, row = Shaping(1, VOCAB, DEVICE), np.array([1])
    request = Request("r", Prompt.of_tokens(prompt), length, sampling=ASKED)
    shaping.open(Join(1, 1, request, length, len(output), length, text))
    tree = OPS.build_chain(
        torch.tensor([1]), torch.from_numpy(rng.integers(0, VOCAB, (1, NODES - 1))), torch.tensor([9]), 99
    )
    logits = torch.randn(NODES, VOCAB)
    known = dict.fromkeys(prompt.tolist()), dict.fromkeys(output.tolist(), 1)

    def counted() -> Tensor:
        return OPS.shape_logits(logits, torch.from_numpy(row), shaping.changes(row, tree).tables, tree)

    assert torch.equal(counted(), by_text(logits, tree, *known))
    took: tuple[list[float], list[float]] = [], []
    for _ in range(CALLS):
        for way, times in zip((lambda: by_text(logits, tree, *known), counted), took, strict=True):
            begin = time.perf_counter()
            way()
            times.append(time.perf_counter() - begin)
    text_ms, counted_ms = (1e3 * median(times) / NODES for times in took)
    return (
        f"{length:>6} tokens: {text_ms:.3f} ms by text, {counted_ms:.3f} ms counted, ratio {text_ms / counted_ms:.1f}"
    )


def filtered(name: str, top_p: float, top_k: int) -> str:
    """Return a line with the milliseconds of processor time that filters add to the probabilities of all nodes."""
    logits = torch.randn(NODES, VOCAB, generator=torch.Generator().manual_seed(1)) * 4.0
    ones = torch.ones(NODES, dtype=torch.float64)

    def timed(share: float, limit: int) -> float:
        begin = time.thread_time()
        OPS.target_probs(logits, ones, ones * share, torch.full((NODES,), limit), share < 1.0 or limit > 0)
        return 1e3 * (time.thread_time() - begin)

    has_numba, found = host.HAS_NUMBA, []
    for host.HAS_NUMBA in (has_numba, False):
        timed(top_p, top_k)
        found.append(median(timed(top_p, top_k) - timed(1.0, 0) for _ in range(CALLS)))
    host.HAS_NUMBA = has_numba
    return f"{name}: {found[0]:.1f} ms for {NODES} nodes, {found[1]:.1f} ms in torch's operations"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for length in (500, 32_000):
        print(compare(length))
    for name, top_p, top_k in (("top-p 0.95", 0.95, 0), ("top-p 0.8, top-k 20", 0.8, 20)):
        print(filtered(name, top_p, top_k))
