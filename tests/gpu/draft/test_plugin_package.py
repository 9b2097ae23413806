"""The example plugin as a user has it: installed, found by its name, and walked through as docs/plugins.md does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "examples" / "plugin_algorithm"
PROMPTS = ["class Cache: class Cache: class", "def get(self, key): return self", "import os import os", "x"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the package was installed into; nothing is fetched, and nothing is written into the source."""
    source = tmp_path_factory.mktemp("source") / PACKAGE.name
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "tests"))
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-compile"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], source.parent)
    return target


def run(line, cwd: Path, **env: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**inherited, **env}
    done = subprocess.run(
        [str(word) for word in line], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def documented() -> list[list[str]]:
    """The commands of docs/plugins.md but the installation."""
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    foredraft, plugin, *lines = block.replace("\\\n", " ").splitlines()
    assert foredraft.startswith("pip install '.[") and plugin == "pip install ./examples/plugin_algorithm"
    return [shlex.split(line) for line in lines]


@pytest.mark.slow
@pytest.mark.xdist_group("plugin package")
def test_the_documented_commands_run(installed, nano_pair, tmp_path):
    foredraft = [sys.executable, "-c", "from foredraft.cli.__main__ import main; main()"]
    programs = {"foredraft": foredraft, "python": [sys.executable]}
    seen = []
    for program, *words in documented():
        words = [str(nano_pair / "target") if word == "MODEL" else word for word in words]
        out = run([*programs[program], *words], tmp_path, PYTHONPATH=str(installed))
        seen.append((words[0], out))
    assert [name for name, _ in seen] == ["simulate", "generate", "audit", "generate", "bench", "check"]
    said = dict(seen)
    assert "identical" in said["audit"]
    assert said["check"].splitlines()[-2:] == ["ok", ""]
    assert json.loads((tmp_path / "runs" / "suffix" / "summary.json").read_text())["algorithm"] == "SUFFIX_AUTOMATON"


SERVE = """
import json, sys
from pathlib import Path
from foredraft.core.prompt import Prompt
from foredraft.core.contract.request import Request
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.plan import SessionOptions

ways, prompts = json.load(sys.stdin)
for way in ways:
    session = DecodeSession.open(SessionOptions(model=Path(sys.argv[1]), dtype="float64", device="cpu", max_running=3, **way))
    texts = [session.tokenizer.encode(prompt) for prompt in prompts]
    requests = [Request(str(i), Prompt.of_tokens(text), 40) for i, text in enumerate(texts)]
    outputs = session.run(requests)
    stats = session.stats()
    print(json.dumps([[list(map(int, outputs[str(i)].tokens)) for i in range(len(texts))], stats.accept_length]))
"""
WAYS = [
    {"algorithm": "NONE"},
    {"algorithm": "SUFFIX_AUTOMATON", "steps": 4},
    {"algorithm": "suffix_automaton", "steps": 3, "topk": 3, "num_draft_tokens": 9, "page_size": 4, "overlap": True},
    {"algorithm": "SUFFIX_AUTOMATON", "adaptive": "with-zero", "overlap": True},
]


@pytest.mark.slow
@pytest.mark.xdist_group("plugin package")
def test_greedy_text_is_that_of_plain_decoding(installed, nano_pair, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps([WAYS, PROMPTS]))
    with asked.open() as stdin:
        done = subprocess.run(
            [sys.executable, script, nano_pair / "target"],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(installed)},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (plain, _), *others = (json.loads(line) for line in done.stdout.splitlines())
    assert len(others) == len(WAYS) - 1 and all(len(tokens) == 40 for tokens in plain[:2])
    for way, (tokens, accept_length) in zip(WAYS[1:], others, strict=True):
        assert tokens == plain, way
        assert accept_length > 1.3, way


@pytest.mark.slow
@pytest.mark.xdist_group("plugin package")
def test_the_package_passes_its_own_tests(installed, tmp_path):
    shutil.copytree(PACKAGE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests"]
    assert " passed" in run(line, tmp_path, PYTHONPATH=str(installed))
