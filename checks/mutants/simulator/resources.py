"""Planted defects of simulators: memory, devices, links and clients."""

from collections import defaultdict
from dataclasses import replace
from typing import ClassVar

from ....sim.actors.device import Jitter
from ....sim.actors.router import Link
from ....sim.cost.passes.forward import ForwardCost
from ....sim.cost.passes.tokens import ExpertRouting
from ...adapters.simulator import CheckedSimulator
from ..planting import Defects

RESOURCES = Defects("simulator", CheckedSimulator)


class ExpertsOfOneToken(ForwardCost):
    """As many experts as a single token reaches."""

    def layers_ns(self, tokens, routing=None):
        return super().layers_ns(tokens, (routing or ExpertRouting(tokens, tokens))._replace(independent=1.0))


class Forgetful(defaultdict[str, int]):
    """Keeps nothing."""

    def __setitem__(self, key, value):
        pass


@RESOURCES.breaks("SIM-10", "SIM-11")
class KeepsALargePool(CheckedSimulator):
    """Of a pool above a limit all but a small part is set aside."""

    def scenario(self, service, workload):
        if service.pages * self.config.page_size > 200:
            service = replace(service, pages=64 // self.config.page_size)
        return super().scenario(service, workload)


@RESOURCES.breaks("SIM-10")
class RetractsAfterGrowth(CheckedSimulator):
    """A pool that has room for everything, and ran with fewer pages before, retracts a request at every other step."""

    fewest_pages: ClassVar = {}  # by service, over all runs

    def plan(self, service):
        longest = max(service.prompt_lens) + max(service.output_lens) + 4 * self.config.page_size
        least = self.fewest_pages.setdefault(replace(service, pages=0), service.pages)
        if least < service.pages and service.num_requests * longest < service.pages * self.config.page_size:
            service = replace(service, faults=(("pool.retraction", 500),))
        return super().plan(service)


@RESOURCES.breaks("SIM-11")
class ForgetsThePool(CheckedSimulator):
    """Memory is unbounded."""

    def scenario(self, service, workload):
        return super().scenario(replace(service, pages=max(service.pages, 10**6)), workload)


@RESOURCES.breaks("SIM-11")
class ClampsWhatCannotBe(CheckedSimulator):
    """Impossible numbers are replaced by the nearest possible ones."""

    def simulate(self, service, workload):
        counts = ("num_requests", "pages", "max_running", "replicas", "rate_per_ks")
        possible = replace(service, **{name: max(1, getattr(service, name)) for name in counts})
        return super().simulate(possible, workload if "trace" in workload else self.load(possible))

    def load(self, service):
        counts = {name: max(1, getattr(service, name)) for name in ("num_requests", "rate_per_ks")}
        return super().load(replace(service, **counts))


@RESOURCES.breaks("SIM-11")
class DropsUnknownFaults(CheckedSimulator):
    """Of a fault plan only the names that are known and the probabilities that can be are read."""

    def plan(self, service):
        known = [fault for fault in service.faults or () if fault[0] != "device.sulks" and 0 <= fault[1] <= 1000]
        return super().plan(replace(service, faults=service.faults and tuple(known)))


@RESOURCES.breaks("SIM-11")
class RefusesTheSmall(CheckedSimulator):
    """A service of a single request is refused: there would be nothing to average."""

    def scenario(self, service, workload):
        if service.num_requests == 1:
            raise ValueError("one request is no service")
        return super().scenario(service, workload)


@RESOURCES.breaks("SIM-14")
class ReadsTheExpertsOfOneToken(CheckedSimulator):
    """A pass over many tokens of a sparse model reads the experts that one token reaches."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        simulation.assembly.cost._target.__class__ = ExpertsOfOneToken
        return simulation


@RESOURCES.breaks("SIM-17")
class StopsNoBlock(CheckedSimulator):
    """A request that comes while a step of several rounds runs waits for its end, though a row is free."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas:
            submit = actor.handoff.submit
            actor.handoff.submit = lambda request, submit=submit: submit(request)._replace(replan=False)
        return simulation


@RESOURCES.breaks("SIM-14")
class PlansForNothing(CheckedSimulator):
    """The time of planning is not charged."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas:
            actor.host.cost = replace(actor.host.cost, plan_base_ns=0)
        return simulation


@RESOURCES.breaks("SIM-14")
class HasAnOlderMemory(CheckedSimulator):
    """A device with a faster memory is priced with that of an older one."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        cost = simulation.assembly.cost._target
        if cost.gpu.name != "H100":
            cost.gpu = replace(cost.gpu, memory_bandwidth_bytes_per_s=2e12)
        return simulation


@RESOURCES.breaks("SIM-14")
class HalvesLargeBatches(CheckedSimulator):
    """A decode round of more than two rows is priced at half of its time."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        cost = simulation.assembly.cost
        cost.decode_ns = lambda batch, *shape, good=cost.decode_ns: good(batch, *shape) // (1 + (batch > 2))
        return simulation


@RESOURCES.breaks("SIM-14", "RAISES")
class ReceivesManyAtOnce(CheckedSimulator):
    """A port takes in transfers from several engines at the same time."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if simulation.cluster is not None:
            simulation.cluster.network._in_free_ns = Forgetful(int)
        return simulation


@RESOURCES.breaks("SIM-15")
class SendsInParallel(CheckedSimulator):
    """A link carries any number of requests at once."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for wire in getattr(simulation.router, "links", {}).values():
            link = getattr(wire, "link", wire)
            link.send = lambda *message, link=link: Link(link.env, link.latency_ns, 1e15).send(*message)
        return simulation


@RESOURCES.breaks("SIM-15", "SIM-16")
class NeverCountsDown(CheckedSimulator):
    """A router's load never goes down."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if simulation.cluster is None:
            simulation.router._balancer.ended = lambda *_: None
        return simulation


@RESOURCES.breaks("SIM-15")
class IgnoresDeadlines(CheckedSimulator):
    """Clients wait for their answers for ever."""

    def scenario(self, service, workload):
        return super().scenario(replace(service, deadline_ms=0), workload)


@RESOURCES.breaks("SIM-14")
class FluctuatesUpwards(CheckedSimulator):
    """Device times fluctuate around their medians, so that their mean is greater than without."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas:
            if isinstance(actor.device.jitter, Jitter):
                actor.device.jitter._shift = 0.0
        return simulation


@RESOURCES.breaks("SIM-14")
class FluctuatesTogether(CheckedSimulator):
    """The device times of all engines are drawn from one sequence."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas[1:]:
            actor.device.jitter = simulation.replicas[0].device.jitter
        return simulation


@RESOURCES.breaks("SIM-16")
class WaitsForOneMore(CheckedSimulator):
    """A chunk of output is sent when its interval is exceeded, not when it is reached."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for streamer in simulation.streamers.values():
            given = streamer.front_end
            streamer.front_end = replace(given, stream_interval=given.stream_interval + (given.stream_interval > 1))
        return simulation


@RESOURCES.breaks("SIM-16")
class SendsChunksTogether(CheckedSimulator):
    """The process that sends chunks does not remember when it is done with those of the step before."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for streamer in simulation.streamers.values():
            streamer._send = lambda *chunks, good=streamer._send, streamer=streamer: (
                setattr(streamer, "_free_ns", 0) or good(*chunks)
            )
        return simulation


@RESOURCES.breaks("SIM-13")
class FailsForFree(CheckedSimulator):
    """A step that fails has cost its device nothing."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas:

            def lose(flight, fault, actor=actor, good=actor._lose_steps):
                busy_ns = actor.device.busy_ns
                yield from good(flight, fault)
                actor.device.busy_ns = busy_ns

            actor._lose_steps = lose
        return simulation


@RESOURCES.breaks("SIM-15")
class HearsNoLeaving(CheckedSimulator):
    """A client that leaves is not heard."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        simulation.router.cancel = lambda request_id: None
        return simulation


@RESOURCES.breaks("SIM-08", "SIM-15", "SIM-16", "RAISES")
class TakesACopyForAnother(CheckedSimulator):
    """A message that is delivered twice is two requests."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for actor in simulation.replicas if simulation.faults.is_faulty else ():
            actor.hooks._seen = Forgetful()
        return simulation
