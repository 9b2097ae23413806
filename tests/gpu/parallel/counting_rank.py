"""One rank of a small model with random weights, started by test_priced_ranks.py: decodes on a CPU with the others, and
prints what it has exchanged in one decode round, and the bytes of its matrices."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.driver import Driver
from foredraft.gpu.measure.plan import plan_bench
from foredraft.gpu.measure.ranks import options_from_json
from foredraft.gpu.measure.run import Bench
from foredraft.gpu.parallel.link import connect
from foredraft.gpu.types.shards import EXCHANGES, Shard


def main(rank: int, port: int, options: dict) -> None:
    asked = options_from_json(options)
    connect("127.0.0.1", port, rank, asked.tensor_parallel, "gloo")
    plan = plan_bench(asked)
    bench = Bench(plan, shard=Shard(rank, asked.tensor_parallel))
    target, _ = bench.models
    embedding = () if plan.target.tied_embeddings else (target.embed_weight.data_ptr(),)
    matrices = [x.nbytes for x in target.parameters() if x.ndim > 1 and x.data_ptr() not in embedding]

    arm, (cell,) = bench.arm(plan.cells[0].arms[-1]), plan.cells
    # Rounds as a GPU captures them, without the capture.
    engine, executor = replace(arm, spec=replace(arm.spec, graph_sizes=(cell.batch_size,))).open(lambda event: None)
    driver = Driver(engine, executor)
    prompt = Prompt.of_tokens(np.arange(1, 1 + cell.context_len))
    for number in range(cell.batch_size):
        driver.submit(Request(str(number), prompt, asked.output_tokens))
    turns: list[list[tuple[str, int]]] = []
    while not engine.is_idle:
        seen: list[tuple[str, int]] = []
        EXCHANGES.on_exchange = lambda kind, num_bytes, seen=seen: seen.append((kind, num_bytes))
        rounds = executor.counters.rounds
        driver.turn()
        if executor.counters.rounds == rounds + 1:
            turns.append(seen)
    # With all rows, and without a prompt.
    print(json.dumps({"exchanged": turns[1], "matrices": sum(matrices)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
