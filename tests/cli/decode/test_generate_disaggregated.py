"""`foredraft generate --disaggregate`: the same output, a log per worker, nothing left behind, bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAIR = ("--disaggregate", "prefill=1,decode=1")
GONE_S = 60.0


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "def add", "id": "long", "max_tokens": 30},
        {"tokens": [5, 6, 7], "max_tokens": 1},
        {"prompt": "for i in", "temperature": 0.9, "seed": 5, "max_tokens": 20},
        {"messages": [{"role": "user", "content": "Hi"}], "id": "chat", "max_tokens": 12},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listening_ports(pids):
    """TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link) if link.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                host, port = columns[1].split(":")
                ports.append((host, int(port, 16)))
    return ports


def is_running(pid):
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids):
    deadline = time.monotonic() + GONE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some are still there"
        time.sleep(0.05)


def wait_until_free(port):
    """Wait until the port can be bound: the system may release the sockets of a process after its end."""
    deadline = time.monotonic() + GONE_S
    while True:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("127.0.0.1", port))
                return
            except OSError:
                assert time.monotonic() < deadline, f"port {port} is still taken"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_output_is_that_of_one_process_and_every_worker_keeps_a_log(command, models, prompts, tmp_path):
    arguments = ("generate", "--model", models["target"], "--draft", models["EAGLE3"], "--topk", 2)
    arguments += ("--dtype", "float64", "--device", "cpu", "--prompts", prompts)
    alone = command(*arguments)
    out = tmp_path / "run"
    (out / "decode7").mkdir(parents=True)
    (out / "decode7" / "events.jsonl").write_text("of an earlier run")
    pair = command(*arguments, *PAIR, "--out", out, "--stats")
    assert pair.code == 0 and pair.out == alone.out
    assert "accept length" in pair.err and "decode0_verify" in pair.err
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert files == ["decode0/events.jsonl", "outputs.jsonl", "prefill0/events.jsonl", "summary.json"]
    assert (out / "outputs.jsonl").read_text() == alone.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["workers"] == ["prefill0", "decode0"] and summary["completed"] == 4 and not summary["incomplete"]
    for name in ("prefill0", "decode0"):
        replayed = command("audit", "--replay", out / name)
        assert replayed.code == 0 and " identical" in replayed.out, replayed
    audited = command("audit", out / "decode0" / "events.jsonl")
    assert audited.code == 0, audited


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_port(process, models, number):
    """After Ctrl-C the requests end in order; when the parent is killed, its workers end too."""
    running = process(
        "generate", "--model", models["target"], "--device", "cpu", "--prompt", "def add", "--max-tokens", 100_000,
        "--ignore-eos", *PAIR, "--context-len", 256,
    )  # fmt: skip
    assert running.stdout.read(1), running.stderr.read()
    workers = children_of(running.pid)
    ports = listening_ports([running.pid, *workers])
    assert len(workers) == 2 and ports
    assert {host for host, _ in ports} == {"0100007F"}, "a port is open beyond the loopback"
    for pid in [running.pid, *(workers if number == signal.SIGINT else [])]:  # a terminal tells the whole group
        os.kill(pid, number)
    _, err = running.communicate(timeout=GONE_S)
    if number == signal.SIGINT and running.returncode != 0:  # else it was through by then
        assert running.returncode == 130 and "interrupted" in err
    wait_until_gone(workers)
    for _, port in ports:
        wait_until_free(port)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
def test_an_interruption_while_workers_start_ends_them(process, models):
    running = process(
        "generate", "--model", models["target"], "--device", "cpu", "--prompt", "def add", "--max-tokens", 100_000,
        "--ignore-eos", *PAIR, "--context-len", 256,
    )  # fmt: skip
    deadline = time.monotonic() + GONE_S
    while len(workers := children_of(running.pid)) < 2:
        assert time.monotonic() < deadline and running.poll() is None, running.stderr.read()
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=GONE_S)
    assert running.returncode == 130 and "Traceback" not in err, err
    wait_until_gone(workers)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--disaggregate", "prefill=0,decode=1"), "disaggregate: prefill=0; 1 to 64 workers are possible"),
        ((*PAIR, "--device", "cuda"), "needs 2 GPUs, torch finds 0"),
        ((*PAIR, "--device", "tpu"), "'tpu' is neither cpu nor cuda"),
        ((*PAIR, "--algorithm", "EAGEL3"), "unknown algorithm 'EAGEL3'"),
        ((*PAIR, "--kv-tokens", 1 << 60), "not enough memory on cpu"),
        ((*PAIR, "--algorithm", "NONE", "--steps", 3), "NONE drafts nothing"),
    ],
)
def test_bad_input_is_one_message_before_a_process_is_started(refused, models, monkeypatch, arguments, expected):
    def none(*given, **more):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("subprocess.Popen", none)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert expected in refused("generate", "--model", models["target"], "--prompt", "def add", *arguments)


@pytest.mark.slow
def test_a_plugin_with_a_field_of_its_own_is_disaggregated(process, models, tmp_path):
    """The example package, found by its entry point in the parent and in both workers."""
    info = tmp_path / "foredraft_suffix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foredraft-suffix\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[foredraft.algorithms]\nSUFFIX_AUTOMATON = foredraft_suffix.drafting:SuffixAutomatonDrafting\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "examples" / "plugin_algorithm")])
    line = ("generate", "--model", models["target"], *["--device", "cpu", "--dtype", "float64"])
    line += (
        "--algorithm",
        "SUFFIX_AUTOMATON",
        "--steps",
        4,
        "--prompt",
        "def add def add def",
        "--max-tokens",
        40,
        "--json",
        "--stats",
    )
    told = []
    for more in ((), PAIR):
        running = process(*line, *more, env={"PYTHONPATH": path})
        out, err = running.communicate(timeout=120)
        assert running.returncode == 0, err
        told.append((out, err.split("accept length")[1].split("(")[0]))
    assert told[0] == told[1], "another text, or another fate of the drafts"
