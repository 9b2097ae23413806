"""Planted defects of a simulator's parts: ours, with something in it done wrong before it runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ....core.draws import request_key
from ....sim.actors.link import Link
from ....sim.cost.forward import ForwardCost
from ....sim.cost.round import RoundCost
from ...adapters.simulator import CheckedSimulator


class OtherParts(CheckedSimulator):
    """Ours, with `spoil(simulation, metrics)` done to it before it runs."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        self.spoil(simulation, metrics)
        return simulation


class _OneMoreDraftPass(RoundCost):
    def _draft_passes(self, batch_size, steps, *rest, **options):
        return super()._draft_passes(batch_size, steps and steps + 1, *rest, **options)


class _ExpertsOfOneToken(ForwardCost):
    def active_experts(self, tokens, *rest):
        return super().active_experts(1, *rest)


class DraftsOnceTooOften(OtherParts):
    """A round is charged one draft pass more than it has."""

    def spoil(self, simulation, metrics):
        simulation.assembly.cost.__class__ = _OneMoreDraftPass


class ReadsTheExpertsOfOneToken(OtherParts):
    """Verifying many tokens of a sparse model reads the experts that one token reaches."""

    def spoil(self, simulation, metrics):
        simulation.assembly.cost._target.__class__ = _ExpertsOfOneToken


class PlansForNothing(OtherParts):
    """The time of planning is not charged."""

    def spoil(self, simulation, metrics):
        for actor in simulation.replicas:
            actor.host = replace(actor.host, plan_base_ns=0)


class _AlwaysFree(defaultdict):
    def __setitem__(self, port, free_ns):
        pass


class ReceivesManyAtOnce(OtherParts):
    """A port takes in transfers from several engines at the same time."""

    def spoil(self, simulation, metrics):
        if simulation.cluster is not None:
            simulation.cluster.network._in_free_ns = _AlwaysFree(int)


class ReplaysOneRecording(OtherParts):
    """Every request accepts what the first one accepts."""

    def spoil(self, simulation, metrics):
        submit, first = simulation.router.submit, request_key("r0")
        simulation.router.submit = lambda request, truth: submit(request, replace(truth, key=first))


class SendsInParallel(OtherParts):
    """A link carries any number of requests at once."""

    def spoil(self, simulation, metrics):
        for link in getattr(simulation.router, "links", ()):
            link.send = lambda size, deliver, *rest, link=link: Link(link.env, link.latency_ns, 1e15).send(
                size, deliver, *rest
            )


class BreaksTiesByHash(OtherParts):
    """Of equally busy engines the router takes the one with the smallest `hash()`."""

    def spoil(self, simulation, metrics):
        if simulation.cluster is None:
            balancer = simulation.router._balancer
            balancer._choose = lambda among: min(
                among, key=lambda engine: (balancer.outstanding[engine], hash(f"{balancer._num_routed}/{engine}"))
            )


class NeverCountsDown(OtherParts):
    """A router's load never goes down."""

    def spoil(self, simulation, metrics):
        if simulation.cluster is None:
            simulation.router._balancer.ended = lambda *_: None


class _Forgetful(dict):
    def __setitem__(self, name, value):
        pass


class TakesACopyForAnother(OtherParts):
    """A message that is delivered twice is two requests."""

    def spoil(self, simulation, metrics):
        for actor in simulation.replicas:
            if simulation.faults is not None:
                actor.hooks._seen = _Forgetful()


class ForgetsTheGapOfARetraction(OtherParts):
    """The time that a request waits after a retraction is in no inter-token latency."""

    def spoil(self, simulation, metrics):
        lives = metrics.lives
        retracted = lives._retracted

        def forget(state, request_ids):
            retracted(state, request_ids)
            metrics.flush()
            for request_id in request_ids:
                lives.open.last_token_ns[state.slots[request_id]] = -1

        lives._retracted = forget


DEFECTS = (
    (BreaksTiesByHash, ("SIM-01",)),
    (ForgetsTheGapOfARetraction, ("SIM-13",)),
    (DraftsOnceTooOften, ("SIM-14",)),
    (ReadsTheExpertsOfOneToken, ("SIM-14",)),
    (PlansForNothing, ("SIM-14",)),
    (ReceivesManyAtOnce, ("SIM-14", "RAISES")),
    (ReplaysOneRecording, ("SIM-15",)),
    (SendsInParallel, ("SIM-15",)),
    (NeverCountsDown, ("SIM-15", "SIM-16")),
    (TakesACopyForAnother, ("SIM-16", "RAISES")),
)
"""(class, the invariants of which one must catch it)."""
