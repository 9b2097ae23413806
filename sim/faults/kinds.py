"""Every kind of fault: its occasions, its probability in a swarm, the fault itself, and the promise under it."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = ("step", "request", "message", "run", "packet", "transfer")
"""Occasions. A packet is what one engine sends to another at once: a message, or pages of KV.
A transfer is one request's."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """The constants of a kind. `number` keys its draws and never changes;
    `swarm` is the range of its probability in a swarm."""

    number: int
    occasion: str  # one of `UNITS`
    swarm: tuple[float, float]
    fault: str
    promise: str

    @property
    def needs_transfers(self) -> bool:
        """It happens between engines of which one computes prompts and the other decodes."""
        return self.occasion in ("packet", "transfer")


TEXT = """
device.raises         1  step     0.001  0.02  a step raises
    -> no token of it is delivered; its slots are fenced; its requests are tried again
device.out_of_memory  2  step     0.001  0.01  for a while steps above half of this one's tokens run out of memory
    -> fewer steps, then a smaller batch, then retraction
device.hangs          3  step     0.0005 0.004 a step does not come back
    -> a watchdog reports what was in flight; the worker is started again
device.slow           4  step     0.001  0.01  a straggler: steps take a multiple of their time -> only time is lost
device.restarts       5  step     0.0005 0.004 the worker is lost
    -> nothing of the old epoch is read; requests continue after what was delivered
device.poison         6  request  0.002  0.02  every step with this request raises -> only that request fails
device.nan           26  step     0.001  0.005 the target's logits for one request are not finite
    -> that request fails with the reason, the others continue
link.late             7  message  0.01   0.1   a message comes late, after others
    -> no request is lost; a cancel before its request is kept
link.duplicated       8  message  0.01   0.1   a message comes twice -> it counts once
link.lost             9  message  0.01   0.1   a message is lost -> it is sent again, or its request ends for that reason
client.cancels       10  request  0.02   0.2   a client cancels its request twice, in whatever state it is
    -> no later token; all is released
client.gone          11  request  0.01   0.1   a client is gone; the service notices late -> no later token; all is released
client.duplicate_id  12  request  0.01   0.1   a second request with a live id -> refused; the first is unaffected
client.bad_request   13  request  0.01   0.1   empty or oversize prompts, NaN, negative and zero parameters -> refused with the limit
client.token_limits  14  request  0.01   0.1   max_tokens of 1, or of 2**40 -> they hold, capped by the context
client.stop_edge     15  request  0.02   0.2   a stop one before, at, or one past max_tokens
    -> the first end counts; usage is what was delivered
draft.right          16  step     0.002  0.02  for a while every draft is right -> the output is unchanged; steps stay candidates
draft.wrong          17  step     0.002  0.02  for a while every draft is wrong -> the output is unchanged; steps stay candidates
draft.nan            18  step     0.005  0.05  NaN, infinite, negative and huge feedback -> refused; the policy does not change
pool.denied          19  step     0.005  0.05  allocations fail -> nothing changes; no token is lost; requests progress
pool.retraction      20  step     0.005  0.05  a running request is retracted -> it continues after what was delivered
load.burst           21  request  0.005  0.05  ten requests instead of one -> the queue stays bounded; others are refused with a reason
clock.jump           22  step     0.002  0.02  the host's clock jumps -> no time stamp goes back; no negative duration
clock.freeze         23  step     0.002  0.02  the host's clock stands still -> no time stamp goes back; no negative duration
config.half_written  24  step     0.005  0.05  a reload reads half of a table -> the last good table stays
service.shutdown     25  run      0.2    0.5   the service is shut down -> all finish or are aborted; every slot is free again
transfer.lost        30  packet   0.002  0.02  a message between engines is lost, or a page of KV
    -> it is never decoded or cached; tried once more, then failed; leases free the slots
transfer.short       31  packet   0.002  0.02  a page of KV arrives short -> it is never decoded or cached; tried once more
transfer.corrupt     32  packet   0.002  0.02  a page of KV arrives with other bytes -> it is never decoded or cached; tried once more
transfer.duplicated  33  packet   0.005  0.05  a packet comes twice -> it counts once; no request joins twice
transfer.reordered   34  packet   0.005  0.05  pages come in another order, a message lets others pass -> order does not matter
transfer.late        35  packet   0.002  0.02  a packet comes late -> late packets of an ended transfer are ignored
transfer.slow        36  packet   0.0005 0.005 for a while the network has a part of its bandwidth -> only time is lost
transfer.ack_lost    37  transfer 0.01   0.1   the acknowledgement is lost -> it is asked for and sent again; no request joins twice
transfer.cancelled   38  transfer 0.02   0.2   a client leaves while its KV is on its way -> no later token; both sides free everything
transfer.peer_dies   39  transfer 0.005  0.03  one of the two engines dies in the middle of a transfer
    -> its requests fail once or continue, the others continue; every slot is free again
transfer.decoder_lost 40 transfer 0.005 0.03 a decode engine is lost with all that it has; later a new one comes
    -> its requests go on on another one behind what was delivered, once; without another one they fail
"""
"""A kind a line: its name, `number`, `occasion`, the two ends of `swarm`, `fault` -> `promise`."""


def _read(text: str) -> dict[str, FaultKind]:
    kinds = {}
    for line in text.replace("\n    ->", " ->").strip().splitlines():
        name, number, occasion, low, high, sentence = line.split(maxsplit=5)
        kinds[name] = FaultKind(int(number), occasion, (float(low), float(high)), *sentence.split(" -> "))
    return kinds


KINDS: dict[str, FaultKind] = _read(TEXT)
