"""The wheel and the sdist in empty environments: what they have, and what runs with which extra, from nothing but
themselves.

`make release` runs this file with the variable DIST, which names the folder that keeps the two.
"""

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

ROOT = Path(__file__).resolve().parents[2]


def call(*line: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with `code`; nothing of this process's Python reaches it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "VIRTUAL_ENV"}
    done = subprocess.run([str(word) for word in line], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{line}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def packages() -> dict[str, str]:
    """Return the folders of the clone, each with its place in the wheel."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it. Tracked files alone are in them, as they stand in the tree."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    given = os.environ.get("DIST")
    out = tmp_path_factory.mktemp("dist") if given is None else ROOT / given
    shutil.rmtree(out, ignore_errors=True)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def wheel(distributions) -> Path:
    return distributions["wheel"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """The folder of an empty environment's commands."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def install(environment: Path, requirement: str) -> None:
    pip = [environment / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    call(*pip, "--constraint", ROOT / "constraints.txt", requirement, cwd=environment)


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_every_module_and_nothing_else(wheel):
    archive = zipfile.ZipFile(wheel)
    modules = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", *packages()], cwd=ROOT, capture_output=True, text=True, check=True)
    names = (name.split("/", 1) for name in tracked.stdout.splitlines())
    assert modules == {f"{packages()[folder]}/{inside}" for folder, inside in names}


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_its_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (information,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert archive.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    metadata = archive.read(f"{information}/METADATA").decode()
    assert "License-Expression: Apache-2.0\n" in metadata and "License-File: LICENSE\n" in metadata
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_properties_need_numpy_and_hypothesis_alone(wheel, environment, tmp_path):
    install(environment, f"{wheel}[properties]")
    code = (
        "import sys\n"
        "import foredraft.properties.conformance, foredraft.properties.harness.machines\n"
        "from foredraft import check\n"
        "from foredraft.properties.allocator.plain import make\n"
        "good, bad = check('allocator', make, budget=5000), check('allocator', lambda config: object(), budget=100)\n"
        "known = ('pydantic', 'simpy', 'pyarrow', 'typer', 'rich', 'pytest', 'torch')\n"
        "print(good.ok, bad.ok, [name for name in known if name in sys.modules])\n"
    )
    assert call(environment / "python", "-c", code, cwd=tmp_path).stdout == "True False []\n"
    done = call(environment / "foredraft", "simulate", cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert done.stderr == f"foredraft: typer is not installed: pip install '{wheel}[sim]'\n"


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_simulate_with_the_extra_sim(wheel, environment, tmp_path):
    install(environment, f"{wheel}[sim]")
    scripts, python = environment, environment / "python"

    example = tmp_path / "work" / "example.toml"
    example.parent.mkdir()
    shutil.copy(ROOT / "examples" / "chat_on_h100.toml", example)
    settings = ["--set", "workload.num_requests=50", "--out", "run", "--quiet"]
    done = call(scripts / "foredraft", "simulate", example.name, *settings, cwd=example.parent)
    assert "chat-on-h100" in done.stdout
    assert json.loads((example.parent / "run" / "summary.json").read_text())["completed"] == 50
    assert "decisions identical" in call(scripts / "foredraft", "audit", "--replay", "run", cwd=example.parent).stdout

    code = (
        "import importlib.util, json, sys\n"
        "sys.argv = ['foredraft', 'simulate', '--quiet', '--set', 'workload.num_requests=5', '--out', 'again']\n"
        "from foredraft.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "ours = {m.__file__ for n, m in sys.modules.items() if n.startswith('foredraft.') and m.__file__}\n"
        "extras = ['torch', 'triton', 'pytest', 'plotly', 'ray']\n"
        "found = [name for name in extras if importlib.util.find_spec(name)]\n"
        "print(json.dumps({'ours': sorted(ours), 'found': found, 'path': sys.path}))\n"
    )
    seen = json.loads(call(python, "-c", code, cwd=example.parent).stdout.splitlines()[-1])
    assert not seen["found"], "the environment has an extra; this test proves nothing then"
    assert len(seen["ours"]) > 40
    assert all(Path(file).is_relative_to(environment.parent) for file in seen["ours"])
    assert not any(Path(place).is_relative_to(ROOT) for place in seen["path"] if place)


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_examples_run_outside_the_clone(distributions, kind, tmp_path):
    venv.create(tmp_path / "environment", with_pip=True)
    programs = tmp_path / "environment" / ("Scripts" if os.name == "nt" else "bin")
    install(programs, f"{distributions[kind]}[sim,planning,properties]")
    outside = tmp_path / "outside"
    shutil.copytree(ROOT / "examples", outside / "examples")

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert call(programs / "foredraft", "--version", cwd=outside).stdout == f"foredraft {version}\n"
    assert distributions[kind].name.startswith(f"foredraft-{version}")
    assert "within the SLO" in call(programs / "python", "examples/capacity.py", cwd=outside).stdout
    done = call(programs / "foredraft", "simulate", "examples/chat_on_h100.toml", "--quiet", cwd=outside)
    assert "chat-on-h100" in done.stdout
    few = ("--set", "workload.num_requests=50", "--quiet", "--seeds", "2", "--workers", "2", "--out", "runs")
    call(
        programs / "foredraft",
        "sweep",
        "examples/chat_on_h100.toml",
        "--grid",
        "speculation.steps=0,3",
        *few,
        cwd=outside,
    )
    assert "speculation.steps" in (outside / "runs" / "trials.jsonl").read_text(), "worker processes ran"
    checked = call(programs / "foredraft", "check", "allocator", "plain-allocator", "--budget", "2000", cwd=outside)
    assert "allocator" in checked.stdout
