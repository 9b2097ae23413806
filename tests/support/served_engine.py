"""A small engine over the reference executor, for tests that look at one behaviour at a time."""

from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import ignore
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor

MODEL = HashLanguageModel(seed=1, vocab_size=24)


def make(
    algorithm="STANDALONE", steps=3, agreement=0.7, fail_at=None, events=ignore, text_decoder=None, shape=None, **config
):
    """An engine and its executor; `config` overrides small, roomy defaults."""
    defaults = {"num_pages": 400, "context_len": 96, "max_running": 4, "chunk_size": 16, "multi_step_rounds": 1}
    engine = Engine(
        EngineConfig(**{**defaults, **config}, track_tokens=True),
        get_algorithm(algorithm),
        fixed_controller(steps, **(shape or {})),
        events=events,
        text_decoder=text_decoder,
    )
    return engine, ReferenceExecutor(engine, HashDraft(MODEL, agreement), fail_at=fail_at)


def ask(name, prompt_len=5, max_tokens=12, start=0, **fields):
    """A request whose prompt is `prompt_len` successive tokens."""
    return Request(name, Prompt.of_tokens([(start + j) % 24 for j in range(prompt_len)]), max_tokens, **fields)


def turn(engine, executor):
    """Plan and launch until None, then commit the oldest step.
    Returns the steps planned and the outcome (None: nothing in flight)."""
    driver = Driver(engine, executor)
    planned, outcome = driver.plan(), driver.commit()
    engine.check()
    return planned, outcome


def finish(engine, executor, most=500):
    """Serve until nothing is left: ended requests by id."""
    ended = {}
    for _ in range(most):
        _, outcome = turn(engine, executor)
        if outcome is None:
            assert engine.is_idle
            return ended
        ended |= {end.request_id: end for end in outcome.finished}
    raise AssertionError(f"no end after {most} steps")
