"""The parts of disaggregated decoding without processes:
counts and devices, pages as bytes, parcels, control messages, fault plans."""

from __future__ import annotations

import json
import selectors
import socket
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from foredraft.core.algorithm.algorithm import SpecAlgorithm
from foredraft.core.algorithm.registry import get_algorithm, is_known_everywhere, register_algorithm
from foredraft.core.errors import ConfigError
from foredraft.core.handoff import TransferKey
from foredraft.core.handoff.messages import Ack, Renew
from foredraft.core.scheduler.config import EngineConfig, EngineRole
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.batch.pools import KVPool
from foredraft.gpu.disaggregation.scores import PromptsToScore
from foredraft.gpu.disaggregation.session import plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.disaggregation.workers import Workers
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.parallel.link import (
    FAULTS_VARIABLE,
    InjectedLinkFaults,
    PageParcel,
    ParcelFaults,
    _framed,
    _messages_in,
    plans_from_environment,
)
from foredraft.gpu.parallel.page_tensors import PageTensors
from foredraft.gpu.parallel.processes import WorkerFailed, WorkerPlace, backend_for
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.types.attention import KVShape
from foredraft.observe.children.wire import Wire
from matrix_cells import OPS, small_head, small_model
from serving import CONFIG, Way

# -- counts and devices ------------------------------------------------------------------------------------------------


def test_counts_are_read_in_any_order():
    assert WorkerCounts.parse("prefill=1,decode=2") == WorkerCounts(1, 2)
    assert WorkerCounts.parse(" decode = 3 , prefill=2") == WorkerCounts(2, 3)
    names = [(place.name, place.role.value, place.rank) for place in WorkerCounts(1, 2).workers()]
    assert names == [("prefill0", "prefill", 0), ("decode0", "decode", 1), ("decode1", "decode", 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill=0,decode=1", "prefill=0; 1 to 64 workers are possible"),
        ("prefill=1,decode=0", "decode=0; 1 to 64 workers are possible"),
        ("prefill=65,decode=1", "prefill=65; 1 to 64"),
        ("prefill=-1,decode=1", "'prefill=-1': prefill needs a number, as in prefill=1"),
        ("prefill=1", "decode is missing; an example: prefill=1,decode=1"),
        ("", "'' is neither prefill=N nor decode=N"),
        ("prefil=1,decode=1", "'prefil=1' is neither prefill=N nor decode=N (did you mean 'prefill'?)"),
        ("prefill,decode=1", "'prefill': prefill needs a number"),
        ("prefill=one,decode=1", "'prefill=one': prefill needs a number"),
        ("prefill=1,decode=1,prefill=2", "prefill is given twice"),
        ("prefill=1,decode=99999999999", "decode needs a number"),
    ],
)
def test_senseless_counts_are_named(text, expected):
    with pytest.raises(ConfigError) as caught:
        WorkerCounts.parse(text)
    assert expected in str(caught.value) and "disaggregate" in str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "asked", "expected"),
    [
        (0, "auto", ("cpu",) * 3),
        (3, "auto", ("cuda:0", "cuda:1", "cuda:2")),
        (4, "cuda", ("cuda:0", "cuda:1", "cuda:2")),
        (1, "cuda:0", ("cuda:0",) * 3),
        (4, "cpu", ("cpu",) * 3),
    ],
)
def test_each_worker_has_a_gpu_unless_all_share_one(monkeypatch, num_gpus, asked, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    devices = WorkerCounts(1, 2).devices(asked)
    assert devices == expected
    assert backend_for(devices) == ("gloo" if len(set(devices)) == 1 else "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(("num_gpus", "asked"), [(1, "auto"), (2, "cuda"), (0, "cuda")])
def test_more_workers_than_gpus_are_refused(monkeypatch, num_gpus, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=f"prefill=1,decode=2 needs 3 GPUs, torch finds {num_gpus}; --device cuda:0"):
        WorkerCounts(1, 2).devices(asked)


def test_workers_on_one_device_share_what_it_has(models, monkeypatch):
    options = SessionOptions(models["target"], device="cpu", memory_fraction=0.8)
    monkeypatch.setattr("foredraft.gpu.disaggregation.session.idle_cores", lambda: 8)
    plan = plan_disaggregated(options, WorkerCounts(1, 3))
    assert plan.options.memory_fraction == pytest.approx(0.2) and plan.options.threads == 2
    asked = SessionOptions(options.model, device="cpu", threads=5)
    assert plan_disaggregated(asked, WorkerCounts(1, 3)).options.threads == 5


def test_an_algorithm_that_other_processes_do_not_know_is_refused(models, forget):
    register_algorithm("ONLY_HERE")(type("OnlyHere", (SpecAlgorithm,), {}))
    assert not is_known_everywhere("only_here") and is_known_everywhere("eagle3")
    options = SessionOptions(models["target"], device="cpu", algorithm="ONLY_HERE")
    with pytest.raises(ConfigError, match="ONLY_HERE was registered in this process alone"):
        plan_disaggregated(options, WorkerCounts(1, 1))


# -- pages as bytes ----------------------------------------------------------------------------------------------------


LATENTS = (KVShape(1, 20, 0),) * 3
MIXED = (KVShape(2, 8, 8), KVShape(1, 16, 24))


def pools_of(algorithm="EAGLE3", page_size=4, filled=True, shapes=None):
    way = Way(
        algorithm, None if algorithm == "NONE" else small_head(0, algorithm), {"steps": 0 if algorithm == "NONE" else 2}
    )
    config = EngineConfig(**{**CONFIG, "page_size": page_size, "num_pages": 12})
    engine = Engine(config, get_algorithm(way.algorithm), way.controller())
    executor = build_executor(engine, small_model(0), way.draft, OPS)
    if shapes is not None:
        executor.pool = KVPool(shapes, executor.pool.num_slots, executor.pool.keys.dtype, executor.pool.keys.device)
    pools = [pool for pool in (executor.pool, executor.draft_pool) if pool is not None]
    for number, pool in enumerate(pools if filled else ()):
        generator = torch.Generator().manual_seed(number)
        for cells in (pool.keys, pool.values):
            cells.copy_(torch.randn(cells.shape, generator=generator, dtype=cells.dtype))
    return PageTensors(executor, page_size), pools


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
@pytest.mark.parametrize(("page_size", "shapes"), [(1, None), (4, None), (4, LATENTS), (4, MIXED)])
def test_pages_arrive_at_other_slots_as_they_were(algorithm, page_size, shapes):
    source, source_pools = pools_of(algorithm, page_size, shapes=shapes)
    target, target_pools = pools_of(algorithm, page_size, filled=False, shapes=shapes)
    here = np.array([3, 7, 1], np.int32)[:, None] * page_size + np.arange(page_size, dtype=np.int32)
    there = np.array([2, 1, 9], np.int32)[:, None] * page_size + np.arange(page_size, dtype=np.int32)
    rows = source.read(here)
    assert source.format == target.format and source.format.page_size == page_size
    assert rows.shape == (3, source.row_bytes) and bool(source.format.draft_bytes) == (algorithm != "NONE")
    arrived, seals = target.seals_of_arrived(rows.view(-1), 3)
    assert seals == source.seals(rows) and all(seal.fits(source.format) for seal in seals) and len(set(seals)) == 3
    target.write(there, arrived)
    for old, new in zip(source_pools, target_pools, strict=True):
        for before, after in ((old.keys, new.keys), (old.values, new.values)):
            assert torch.equal(before[:, here.reshape(-1)], after[:, there.reshape(-1)])
            others = np.setdiff1d(np.arange(after.shape[1]), there)
            assert not after[:, others].any()


def test_a_changed_byte_changes_the_seal_wherever_it_is():
    pages, _ = pools_of("EAGLE3", 1)
    rows = pages.read(np.array([[3]], np.int32))
    (whole,) = pages.seals(rows)
    for place in range(pages.row_bytes):
        damaged = rows.clone()
        damaged[0, place] ^= 1 << (place % 8)
        (seal,) = pages.seals(damaged)
        in_target = place < pages.format.target_bytes
        assert (seal.target_checksum != whole.target_checksum) == in_target
        assert (seal.draft_checksum != whole.draft_checksum) != in_target
    swapped = rows.clone().view(torch.int32)
    swapped[0, :2] = swapped[0, [1, 0]]
    assert pages.seals(swapped.view(torch.uint8)) != [whole]


def test_pages_that_are_cut_off_say_how_much_of_them_is_there():
    pages, _ = pools_of("EAGLE3", 1)
    rows = pages.read(np.array([[3], [5], [6]], np.int32))
    sent = pages.seals(rows)
    target, draft = pages.format.target_bytes, pages.format.draft_bytes
    content = rows.view(-1)[: pages.row_bytes + target + 5]
    kept, seals = pages.seals_of_arrived(content, 3)
    assert len(kept) == 1 and seals[0] == sent[0]
    assert [(s.target_bytes, s.draft_bytes) for s in seals] == [(target, draft), (target, 5), (0, 0)]
    assert not any(seal.fits(pages.format) for seal in seals[1:])
    assert pages.seals_of_arrived(None, 0)[1] == []


# -- parcels -----------------------------------------------------------------------------------------------------------


def test_messages_before_a_damaged_one_are_heard():
    messages = [Renew(TransferKey(f"r{i}", i, 1), 2**40 + i) for i in range(3)] + [
        Ack(TransferKey("é" * 9, 2**70, 1), 1)
    ]
    content = b"".join(map(_framed, messages))
    assert _messages_in(content) == tuple(messages)
    length = len(_framed(messages[0]))
    for end in range(length, 2 * length):
        assert _messages_in(content[:end]) == tuple(messages[:1])
    damaged = bytearray(content)
    damaged[length + 30] ^= 4
    assert _messages_in(bytes(damaged)) == tuple(messages[:1])
    assert _messages_in(b"") == ()


def test_faults_happen_to_the_parcels_that_they_name():
    plan = ParcelFaults.from_json(
        {"duplicate": [2], "drop": [3], "truncate_messages": [4], "truncate_pages": [2]}, "plan"
    )
    faults = InjectedLinkFaults()
    pages = torch.arange(10, dtype=torch.uint8)
    parcels = [PageParcel(1, (), pages if number in (1, 5) else None) for number in range(1, 7)]
    for _ in range(2):  # numbers count anew with every session
        faults.begin(plan)
        sent = [list(faults.disturb(parcel)) for parcel in parcels]
        assert [len(copies) for copies in sent] == [1, 2, 0, 1, 1, 1]
        assert [share for copies in sent for _, share in copies] == [1.0, 1.0, 1.0, 0.5, 1.0, 1.0]
        assert sent[0][0][0] is parcels[0] and len(sent[4][0][0].pages) == 5  # the second that has pages
    assert [list(InjectedLinkFaults().disturb(parcel)) for parcel in parcels] == [[(parcel, 1.0)] for parcel in parcels]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object of workers"),
        ('{"prefill0": 3}', "is 3; expected an object"),
        ('{"prefill0": {"dup": [1]}}', "dup: is no fault of a link"),
        ('{"prefill0": {"duplicate": [0]}}', "expected a list of numbers from 1"),
        ('{"prefill0": {"drop": 3}}', "expected a list of numbers from 1"),
        ('{"prefill0": {"delay_ms": -1}}', "is -1; expected a number"),
        ('{"prefill0": {"delay_ms": NaN}}', "NaN is no JSON number"),
    ],
)
def test_a_senseless_plan_of_faults_is_named(monkeypatch, text, expected):
    monkeypatch.setenv(FAULTS_VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        plans_from_environment()
    assert expected in str(caught.value) and FAULTS_VARIABLE in str(caught.value)


def test_faults_are_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv(FAULTS_VARIABLE, raising=False)
    assert plans_from_environment() == {}
    monkeypatch.setenv(FAULTS_VARIABLE, json.dumps({"decode0": {"delay_ms": 2.5}}))
    assert plans_from_environment() == {"decode0": {"delay_ms": 2.5}}


# -- messages of the workers -------------------------------------------------------------------------------------------


def test_what_caused_a_message_is_heard_before_it(monkeypatch):
    """Also where both are sent after the parent has begun to read."""
    socks = [socket.socketpair() for _ in range(2)]
    roles = (EngineRole.PREFILL, EngineRole.DECODE)
    (to_prefill, prefill), (to_decode, decode) = ([Wire(end) for end in pair] for pair in socks)
    workers = object.__new__(Workers)
    workers._selector = selectors.DefaultSelector()
    workers.all, workers.silence_s = {}, 60.0
    for role, wire in zip(roles, (to_prefill, to_decode), strict=True):
        place = WorkerPlace(f"{role}0", role, 0)
        workers.all[place.name] = worker = SimpleNamespace(place=place, name=place.name, wire=wire, death="")
        worker.heard_s = worker.pinged_s = time.monotonic()
        workers._selector.register(wire, selectors.EVENT_READ, worker)
    for sender in (prefill, decode):
        sender.send({"say": "earlier"})
    real, later = Wire.receive, [prefill, decode]

    def receive(self):
        messages = real(self)
        while later:
            later.pop(0).send({"say": "cause" if len(later) else "effect"})
        return messages

    monkeypatch.setattr(Wire, "receive", receive)
    said = []
    while len(said) < 4:
        said += [message["say"] for _, message in workers.hear(1.0)]
    assert said.index("cause") < said.index("effect")
    for end in (to_prefill, prefill, to_decode, decode):
        end.close()
    workers._selector.close()


def test_prompts_to_judge_go_on_at_another_worker_and_end_with_the_last_one():
    said: list[tuple[str, int]] = []

    def worker(name: str, role: EngineRole = EngineRole.PREFILL) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, place=WorkerPlace(name, role, 0), say=lambda message: said.append((name, message["number"]))
        )

    all_ = {name: worker(name) for name in ("prefill0", "prefill1")} | {"decode0": worker("decode0", EngineRole.DECODE)}
    living = dict(all_)
    workers = MagicMock(living=lambda: list(living.values()))
    workers.__getitem__.side_effect = all_.__getitem__
    prompts = PromptsToScore(workers)
    first, second = (prompts.begin(np.array([1, 2, 3]), 1) for _ in range(2))
    assert said == [("prefill0", 0), ("prefill1", 1)]
    prompts.lose(living.pop("prefill0"))
    assert said[2:] == [("prefill1", 0)]
    prompts.end(0, [[-0.5, -1.0], [[[7, -0.5]], [[8, -1.0]]]], "")
    assert first.result() == ([-0.5, -1.0], [[(7, -0.5)], [(8, -1.0)]])
    prompts.lose(living.pop("prefill1"))
    prompts.end(1, [[], []], "")  # it was on its way
    with pytest.raises(WorkerFailed, match="no prefill worker is left"):
        second.result()
    living["prefill0"] = all_["prefill0"]
    third = prompts.begin(np.array([1, 2]), 1)
    prompts.end(2, None, "CUDA out of memory")
    with pytest.raises(WorkerFailed, match="prefill0 cannot judge the prompt: CUDA out of memory"):
        third.result()
