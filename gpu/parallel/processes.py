"""The workers' processes, as the parent sees them: it starts, watches and always ends them."""

from __future__ import annotations

import os
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from ...core.errors import ForedraftError
from ...core.scheduler.config import EngineRole
from ...observe.children.child import Child
from ...observe.children.wire import Wire, WireError
from ...observe.engine_lines import write_forwarded

HOST = "127.0.0.1"
SILENCE_S = 60.0
"""A worker that has not answered a ping for this long is killed. Workers answer while they compute."""
START_S = 300.0
"""The same until it is connected: while it loads libraries nothing else runs in it, and a busy machine is slow."""
PING_AFTER_S = 5.0
END_S = 10.0
"""How long a worker may take to end by itself."""
_LOOPBACK_NAMES = ("lo", "lo0")


class WorkerFailed(ForedraftError):
    """A worker could not start or could not open a session; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker: its name, its role, its rank in the process group."""

    name: str
    role: EngineRole
    rank: int

    @property
    def title(self) -> str:
        """What messages call the worker."""
        return f"worker {self.name}"


class WorkerProcess:
    """One worker, a child that runs `module`.

    `death` is why it is gone, in one line that a client may read; empty while it lives. `report` has all of its last
    words, for the operator.
    """

    def __init__(self, place: WorkerPlace, device: str, module: str) -> None:
        self.place = place
        self.device = device
        self.death: str = ""
        self.report: str = ""
        try:
            self._child = Child(module, environment=_environment(), keeps_words=True)
        except OSError as error:
            raise WorkerFailed(f"{place.title} cannot be started: {error.strerror or error}") from None
        self.wire: Wire = self._child.wire
        self.wire.set_send_limit(SILENCE_S)
        self.heard_s = self.pinged_s = time.monotonic()
        self.is_up = False
        self.exchanges: int = 0  # that a rank has said it has begun

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def pid(self) -> int:
        return self._child.pid

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message. A worker that is dead is found when its wire is read."""
        if not self.death:
            self._child.say(message)

    def kill(self) -> None:
        self._child.kill()

    def bury(self, why: str = "") -> None:
        """Kill the process if it still runs, and keep the end of its standard error as the cause of death."""
        ending = self._child.close()
        words = self._child.last_words()
        said = words if (self._child.exit_code or 0) > 0 and not why else ""
        ended = f"was {ending}" if ending.startswith("killed") else f"ended with {ending}"
        self.death, self.report = (
            (why or ended) + (f"; it said: {text}" if text else "") for text in (said.rpartition("\n")[2], said)
        )

    def wait(self, deadline_s: float) -> None:
        """Wait for the process to end, until `deadline_s` on the monotonic clock."""
        self._child.wait(max(0.0, deadline_s - time.monotonic()))


class RankProcesses(ABC):
    """Processes that are connected with each other.
    They serve one session after the other; leaving the context ends them."""

    module: str  # what each of them runs

    def __init__(self, places: Sequence[WorkerPlace], devices: Sequence[str]) -> None:
        """`devices`: of each process, or of each of its ranks, process by process."""
        self.devices = tuple(devices)
        self.num_ranks = len(self.devices) // len(places)  # of each worker
        self.silence_s = SILENCE_S
        self.num_sessions = 0
        self.on_progress: Callable[[WorkerProcess, str], None] = lambda worker, line: None
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._store, self._port = _loopback_store()
        self.all: dict[str, WorkerProcess] = {}
        try:
            for place, device in zip(places, self.devices[:: self.num_ranks], strict=True):
                worker = WorkerProcess(place, device, self.module)
                self.all[place.name] = worker
                self._selector.register(worker.wire, selectors.EVENT_READ, worker)
            self._connect()
        except BaseException:
            self.close(at_once=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(at_once=kind is not None)

    def __getitem__(self, name: str) -> WorkerProcess:
        return self.all[name]

    def living(self) -> list[WorkerProcess]:
        return [worker for worker in self.all.values() if not worker.death]

    @abstractmethod
    def hear(self, wait_s: float) -> list[tuple[WorkerProcess, dict[str, Any] | None]]:
        """Wait up to `wait_s` for messages and return them; None: the process is dead."""

    def wake(self) -> None:
        """End the `hear` that waits, or the next one; any thread may call this."""
        with suppress(BlockingIOError, OSError):  # it will wake up, or it is closed
            self._waker.send(b"w")

    def close(self, at_once: bool = False) -> None:
        """End all processes; those that do not end by themselves are killed, with `at_once` all."""
        try:
            if not at_once:
                for worker in self.living():
                    worker.say({"do": "end"})
                deadline_s = time.monotonic() + END_S
                for worker in self.living():
                    worker.wait(deadline_s)
        finally:
            for worker in self.living():
                worker.kill()
            for worker in self.living():
                worker.bury("ended")
            self._selector.close()
            self._wakes.close()
            self._waker.close()
            self._store = None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _ready(self, wait_s: float, role: EngineRole) -> list[WorkerProcess]:
        """Wait up to `wait_s` for any worker, and return those of a role that can be read."""
        ready = set()
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._wakes.recv(1 << 16)
            else:
                ready.add(key.data.name)
        return [worker for worker in self.living() if worker.name in ready and worker.place.role is role]

    @abstractmethod
    def _connect(self) -> None:
        """Have all processes connect with each other, and wait until they are."""

    def _listen(self, worker: WorkerProcess) -> Iterator[tuple[WorkerProcess, dict[str, Any] | None]]:
        try:
            messages = worker.wire.receive()
        except (WireError, OSError) as error:
            messages, why = None, f"says what is no message: {error}"
        else:
            why = ""
        if messages is None:
            self._selector.unregister(worker.wire)
            worker.bury(why)
            yield worker, None
            return
        worker.heard_s = time.monotonic()
        for message in messages:
            if message["say"] == "line":
                write_forwarded(message["line"], worker.name)
            elif message["say"] == "progress":
                self.on_progress(worker, message["line"])
            elif message["say"] == "pong":
                worker.exchanges = message.get("exchanges", 0)
            else:
                yield worker, message

    def _watch(self, heard: list[tuple[WorkerProcess, dict[str, Any] | None]]) -> None:
        """Ping workers that were silent, and take those that stay silent for dead.
        Time in which this process did not read is left out."""
        now_s = time.monotonic()
        for worker in self.living():
            if worker.pinged_s <= worker.heard_s:
                if now_s - worker.heard_s > min(PING_AFTER_S, self.silence_s):
                    worker.pinged_s = now_s
                    worker.say({"do": "ping"})
                continue
            silence_s = self.silence_s if worker.is_up else START_S
            if now_s - worker.pinged_s > silence_s:
                self._selector.unregister(worker.wire)
                worker.bury(f"did not answer for {silence_s:.0f} s")
                heard.append((worker, None))


def backend_for(devices: tuple[str, ...]) -> str:
    """Return how tensors travel: messages always from host to host, pages from GPU to GPU where no two
    workers share one."""
    on_gpus = devices[0] != "cpu"
    return "cpu:gloo,cuda:nccl" if on_gpus and len(set(devices)) == len(devices) else "gloo"


def _loopback_store() -> tuple[Any, int]:
    """Open the store over which the workers connect, on a free port that only this machine can reach;
    return it with the port."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise WorkerFailed("this build of torch has no torch.distributed with gloo, which connects the workers")
    listening = socket.socket()
    try:
        # The port is free again at once, however its connections end.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, 0))
        listening.listen()
    except OSError as error:
        listening.close()
        raise WorkerFailed(f"no port of {HOST} can be had for the workers: {error.strerror or error}") from None
    port = listening.getsockname()[1]
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, port


def _environment() -> dict[str, str]:
    """Return what the workers' environment has beside this one's: they find each other over the loopback interface,
    unless the user has said otherwise."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACK_NAMES if name in names), None)
    environment: dict[str, str] = {}
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment[variable] = os.environ.get(variable, loopback)
    return environment
