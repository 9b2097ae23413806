"""The workers' processes, as the parent of a disaggregated session sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.scheduler.config import EngineRole
from ..parallel.processes import HOST, RankProcesses, WorkerFailed, WorkerPlace, WorkerProcess, backend_for


class Workers(RankProcesses):
    """Workers that hand KV to each other."""

    module = "foredraft.gpu.disaggregation.worker"

    def hear(self, wait_s: float) -> list[tuple[WorkerProcess, dict[str, Any] | None]]:
        """Wait up to `wait_s` for messages and return them, those of prefill workers first; None: the worker is dead.

        Prefill workers tell the parent before they let a decode worker go on. They are read after the decode workers,
        so the cause of a message is read in the same call and comes before the message.
        """
        effects = [said for worker in self._ready(wait_s, EngineRole.DECODE) for said in self._listen(worker)]
        heard = [said for worker in self._ready(0.0, EngineRole.PREFILL) for said in self._listen(worker)]
        heard += effects
        self._watch(heard)
        return heard

    def ask_all(self, wanted: str, message: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Send `message` to every living worker and wait for their answers of the kind `wanted`; other messages are
        dropped.

        Raises WorkerFailed if one of them fails or dies.
        """
        for worker in self.living():
            worker.say(message)
        return self.answers(wanted)

    def answers(self, wanted: str) -> dict[str, dict[str, Any]]:
        missing = dict.fromkeys(worker.name for worker in self.living())
        found: dict[str, dict[str, Any]] = {}
        while missing:
            for worker, said in self.hear(1.0):
                if said is None:
                    raise WorkerFailed(f"{worker.place.title} {worker.report}")
                if said["session"] != self.num_sessions:
                    continue
                if said["say"] == "failed":
                    raise WorkerFailed(f"{worker.place.title}: {said['message']}")
                if said["say"] == wanted and worker.name in missing:
                    del missing[worker.name]
                    found[worker.name] = said
        return found

    # -- inside -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        # Ranks have links of their own for pages.
        backend = backend_for(self.devices) if self.num_ranks == 1 else "gloo"
        places = [worker.place for worker in self.all.values()]
        for worker in self.all.values():
            peers = [[place.rank, place.name] for place in places if place.role is not worker.place.role]
            worker.say(
                {
                    "do": "connect",
                    "host": HOST,
                    "port": self._port,
                    "rank": worker.place.rank,
                    "world_size": len(places),
                    "backend": backend,
                    "peers": peers,
                    "device": worker.device,
                    "ranks": self._ranks_of(worker.place),
                }
            )
        self.answers("connected")
        for worker in self.all.values():
            worker.is_up = True

    def _ranks_of(self, place: WorkerPlace) -> list[str]:
        """Return the devices of a worker's ranks; none if the worker has the whole model."""
        first = place.rank * self.num_ranks
        return list(self.devices[first : first + self.num_ranks]) if self.num_ranks > 1 else []
