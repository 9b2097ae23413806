"""Processes that run functions of ours start without the working directory on their path, as `python -P` would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
from concurrent.futures import ProcessPoolExecutor
from foredraft.gpu.spawned import spawning

if __name__ == "__main__":
    with spawning() as context, ProcessPoolExecutor(1, context) as pool:
        print(pool.submit(os.getcwd).result(), "PYTHONSAFEPATH" in os.environ)
    print("PYTHONSAFEPATH" in os.environ)
"""


def test_a_process_does_not_import_from_the_working_directory(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "working"
    program.write_text(PROGRAM)
    folder.mkdir()
    (folder / "socket.py").write_text('raise SystemExit("imported from the working directory")\n')
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, program], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{folder} True\nFalse\n"), done.stderr
    assert "working directory" not in done.stderr


def test_no_process_is_spawned_in_another_way():
    places = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "gpu").rglob("*.py") if "get_context(" in path.read_text()
    ]
    assert places == ["gpu/spawned.py"]
