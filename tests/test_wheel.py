"""The wheel, in an empty environment without extras: it runs, without torch, and from nothing but itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def call(*line: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed; nothing of this process's Python reaches it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "VIRTUAL_ENV"}
    done = subprocess.run([str(word) for word in line], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no earlier build and no untracked file in the tree can get into it."""
    source = tmp_path_factory.mktemp("source")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    for folder in packages:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_every_module_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if ".dist-info/" not in name}
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    expected = {
        f"foretoken/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    }
    assert modules == expected


@pytest.mark.xdist_group("wheel")
def test_simulate_in_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    call(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)

    example = tmp_path / "work" / "example.toml"
    example.parent.mkdir()
    shutil.copy(ROOT / "examples" / "chat_on_h100.toml", example)
    settings = ["--set", "workload.num_requests=50", "--out", "run", "--quiet"]
    done = call(scripts / "foretoken", "simulate", example.name, *settings, cwd=example.parent)
    assert "chat-on-h100" in done.stdout
    assert json.loads((example.parent / "run" / "summary.json").read_text())["completed"] == 50
    assert "decisions identical" in call(scripts / "foretoken", "replay", "run", cwd=example.parent).stdout

    code = (
        "import importlib.util, json, sys\n"
        "sys.argv = ['foretoken', 'simulate', '--quiet', '--set', 'workload.num_requests=5', '--out', 'again']\n"
        "from foretoken.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "ours = {m.__file__ for n, m in sys.modules.items() if n.startswith('foretoken.') and m.__file__}\n"
        "extras = ['torch', 'triton', 'hypothesis', 'pytest', 'plotly', 'ray']\n"
        "found = [name for name in extras if importlib.util.find_spec(name)]\n"
        "print(json.dumps({'ours': sorted(ours), 'found': found, 'path': sys.path}))\n"
    )
    seen = json.loads(call(python, "-c", code, cwd=example.parent).stdout.splitlines()[-1])
    assert not seen["found"], "the environment has an extra; this test proves nothing then"
    assert len(seen["ours"]) > 40
    assert all(Path(file).is_relative_to(environment) for file in seen["ours"])
    assert not any(Path(place).is_relative_to(ROOT) for place in seen["path"] if place)
