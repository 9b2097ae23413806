"""Child processes: their wire, how they end, and a pool of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from foredraft.observe.children.child import Child
from foredraft.observe.children.pool import ChildPool, Died
from foredraft.observe.children.wire import MAX_FRAME_BYTES, Wire, WireError

# -- the wire ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    pair = [Wire(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def received(end, count):
    messages = []
    while len(messages) < count:
        messages += end.receive()
    return messages


def test_messages_come_whole_and_in_order(ends):
    messages = [{"do": "submit", "text": "ü" * size, "number": 2**80} for size in (0, 1, 70_000, 3)]
    sender = threading.Thread(target=lambda: [ends[0].send(message) for message in messages])
    sender.start()
    assert received(ends[1], 4) == messages
    sender.join()
    ends[0].close()
    assert ends[1].receive() is None


def test_who_sends_soon_never_waits_for_a_reader_that_pauses(ends):
    messages = [{"number": number, "text": "x" * 50_000} for number in range(100)]
    for message in messages:  # megabytes without a reader: sending returns at once
        ends[0].send_soon(message)
    assert received(ends[1], 100) == messages
    ends[0].send_soon({"number": 100})
    assert received(ends[1], 1) == [{"number": 100}]
    ends[1].close()
    ends[0].send_soon({"number": 101})  # the other end is closed; sending does not fail


def test_a_frame_that_is_no_json_is_refused():
    left, right = socket.socketpair()
    with left, right:
        left.sendall((3).to_bytes(4, "little") + b"{no")
        with pytest.raises(WireError, match="a message that is no JSON"):
            Wire(right).receive()


def test_a_frame_beyond_all_measure_is_refused():
    left, right = socket.socketpair()
    with left, right:
        left.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(WireError, match="a message of 1073741825 bytes"):
            Wire(right).receive()


# -- one child ---------------------------------------------------------------------------------------------------------

SERVE = """
import os, sys, time
from foredraft.observe.children.child import incoming, run_child

def serve(wire):
    messages = incoming(wire)
    print("printed", flush=True)
    wire.send({"pid": os.getpid(), "arguments": sys.argv[2:], "threads": os.environ.get("OMP_NUM_THREADS")})
    while True:
        ACTION

run_child(serve)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of these lines that a child can run."""

    def write(code: str, name: str = "written_child") -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return write


def serving(action: str) -> str:
    return SERVE.replace("ACTION", action)


def wait_until(holds, limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_child_answers_and_its_words_are_kept_for_its_death(module):
    code = serving("""
        said = messages.get()
        if said["do"] == "fail":
            raise ValueError("as asked")
        wire.send(said)
""")
    child = Child(module(code), "7", environment={"OMP_NUM_THREADS": "3"}, keeps_words=True)
    (hello,) = received(child.wire, 1)
    assert hello == {"pid": child.pid, "arguments": ["7"], "threads": "3"}
    child.say({"do": "ü"})
    assert received(child.wire, 1) == [{"do": "ü"}]
    os.kill(child.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches every process
    child.say({"do": "again"})
    assert received(child.wire, 1) == [{"do": "again"}] and child.exit_code is None
    child.say({"do": "fail"})
    assert child.wire.receive() is None
    child.wait()
    assert child.close() == "exit code 1"
    words = child.last_words()
    assert words.startswith("printed") and words.endswith("ValueError: as asked")


def test_a_child_that_still_imports_takes_no_ctrl_c(module):
    child = Child(
        module("import time\nprint('imports', flush=True)\ntime.sleep(0.5)\n" + serving("wire.send(messages.get())"))
    )
    wait_until(lambda: "written_child" in Path(f"/proc/{child.pid}/cmdline").read_text())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    received(child.wire, 1)
    child.say({"do": "live"})
    assert received(child.wire, 1) == [{"do": "live"}]
    child.close()


def test_a_child_that_is_killed_says_so(module):
    child = Child(module(serving("time.sleep(60)")), keeps_words=True)
    received(child.wire, 1)
    assert child.close() == "killed by SIGKILL" and has_ended(child.pid)
    child.say({"do": "nothing"})  # no error: its reader finds that it is dead


def test_what_a_child_prints_is_no_output_of_the_command(module):
    module(serving("messages.get(); os._exit(0)"))
    program = (
        "from foredraft.observe.children.child import Child\n"
        "child = Child('written_child')\n"
        "child.wire.receive(); child.say({}); child.wait(); print('ended', child.close())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended exit code 0\n", "printed\n")


@pytest.mark.parametrize("action", ["time.sleep(60)", "sum(range(10_000_000))"], ids=["waits", "computes"])
def test_a_child_ends_with_its_parent_whatever_it_does(module, action):
    module(serving(action))
    program = (
        "import time\n"
        "from foredraft.observe.children.child import Child\n"
        "child = Child('written_child'); child.wire.receive(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert not has_ended(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: has_ended(pid))


# -- a pool ------------------------------------------------------------------------------------------------------------

JOBS = """
import os
from foredraft.observe.children.pool import serve_jobs

def run(shared, line, tell):
    tell({"half of": line["number"]})
    if line["number"] == shared["deadly"]:
        os.kill(os.getpid(), 9)
    if line["number"] == shared["wrong"]:
        raise ValueError("wrong")
    return {"news": line["number"] * shared["factor"]}

serve_jobs(run)
"""


def test_a_pool_answers_all_jobs_but_those_whose_process_dies(module):
    heard = []
    shared = {"factor": 10, "deadly": 2, "wrong": 4}
    with closing(ChildPool[int](module(JOBS), shared, 2, lambda job, news: heard.append((job, news)))) as pool:
        for number in range(6):
            pool.submit(number, {"number": number})
        answers = dict(pool.next_ended() for _ in range(6))
    died = {job: answer.reason for job, answer in answers.items() if isinstance(answer, Died)}
    assert died == {2: "died, 2 times: killed by SIGKILL", 4: "died, 2 times: exit code 1"}
    assert {job: answers[job] for job in (0, 1, 3, 5)} == {n: {"news": n * 10} for n in (0, 1, 3, 5)}
    assert {job for job, _ in heard} == set(range(6)) and (3, {"half of": 3}) in heard


def test_a_closed_pool_has_no_process(module):
    code = JOBS.replace(
        "def run(shared, line, tell):",
        "def run(shared, line, tell):\n    import time; tell(os.getpid()); time.sleep(60)",
    )
    pids = []
    pool = ChildPool[int](module(code), {}, 2, lambda job, pid: pids.append(pid))
    for number in range(3):
        pool.submit(number, {"number": number})
    waiting = threading.Thread(target=pool.next_ended, daemon=True)
    waiting.start()
    wait_until(lambda: len(pids) == 2)
    pool.close()
    wait_until(lambda: all(map(has_ended, pids)))
