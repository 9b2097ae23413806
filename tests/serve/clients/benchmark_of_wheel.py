"""Runs the load generator of another server from its wheel, unmodified: `benchmark_of_wheel.py WHEEL [ARGUMENT …]`.

The server itself is not installed. The modules of its load generator are imported from their files; what they import
for a device or a model, and do not use here, has stand-ins.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from foredraft.checks.servers.wheel import open_wheel

REAL = {
    "sglang": ("bench_serving", "benchmark", "srt.utils.network"),
    "vllm": ("benchmarks", "envs", "logger", "logging_utils", "tokenizers", "transformers_utils", "utils"),
}
"""Package -> its modules that are imported from their files."""
ABSENT = ("datasets",)
"""Packages of which only datasets of others are made, which no test asks for."""


def main(wheel: Path) -> None:
    """Run the load generator of a wheel with the other arguments of the command."""
    package = wheel.name.partition("-")[0]
    open_wheel(wheel, package, [f"{package}.{module}" for module in REAL[package]], ABSENT)
    if package == "sglang":
        import_module("sglang.bench_serving").cli_main()
        return
    serve = import_module("vllm.benchmarks.serve")
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
