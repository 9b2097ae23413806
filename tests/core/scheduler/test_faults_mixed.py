"""Everything that goes wrong at once, in front of an executor with tokens: what is delivered is what plain decoding gives."""

import pytest
from foretoken.core.contract.failure import FailureCause, StepFailure
from foretoken.core.contract.request import FinishReason
from foretoken.core.draws import Purpose, uniform
from foretoken.properties.reference import HashDraft, ReferenceExecutor, plain_greedy
from served_engine import MODEL, ask, make

NUM_REQUESTS = 10
CALM_FROM = 300  # turns; from then on nothing goes wrong any more


class Trouble:
    """One engine, its executor and its clients; every choice is a keyed draw of `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        algorithm = self.pick(0, "NONE", "STANDALONE", "EAGLE", "EAGLE3", "NGRAM", "MULTI_LAYER_EAGLE")
        topk = self.pick(1, 1, 1, 2, 4) if algorithm in ("EAGLE", "EAGLE3", "STANDALONE") else 1
        page_size = self.pick(2, 1, 2, 4)
        self.engine, self.executor = make(
            algorithm,
            steps=0 if algorithm == "NONE" else 3,
            shape={"topk": topk, "num_draft_tokens": 6} if topk > 1 else None,
            overlap=self.pick(3, True, False),
            page_size=page_size,
            num_pages=self.pick(4, 60, 110, 300) * (2 if topk > 1 else 1) // page_size + 40,
            max_running=self.pick(5, 2, 4, 6),
            chunk_size=self.pick(6, 4, 16, 64),
            block_rounds=self.pick(7, 1, 8),
            mixed=self.pick(8, True, False),
            prefix_cache=self.pick(9, True, False),
            preempt=self.pick(10, True, False),
        )
        self.asked = {}
        self.ended = {}
        self.aborted = []
        self.num_lost = 0

    def draw(self, turn: int, what: int) -> float:
        return float(uniform(self.seed, Purpose.SWARM, turn, what))

    def pick(self, what: int, *choices):
        return choices[int(self.draw(1 << 20, what) * len(choices))]

    def note(self, finished) -> None:
        for end in finished:
            assert end.request_id not in self.ended, "a second end"
            self.ended[end.request_id] = end

    def stop_block_if(self, replan: bool) -> None:
        if replan:
            self.executor.request_stop(self.engine.last_step_id)

    def arrive(self, turn: int) -> None:
        if len(self.asked) == NUM_REQUESTS or self.draw(turn, 0) >= 0.3:
            return
        request = ask(
            f"r{len(self.asked)}",
            prompt_len=4 + int(self.draw(turn, 1) * 14),
            max_tokens=1 + int(self.draw(turn, 2) * 20),
            start=int(self.draw(turn, 3) * 3),
            priority=int(self.draw(turn, 4) * 2),
        )
        self.asked[request.request_id] = request
        outcome = self.engine.submit(request, 0)
        assert not outcome.refusal
        self.stop_block_if(outcome.replan)

    def disturb(self, turn: int) -> None:
        """A client leaves, memory is taken away, a running request is asked back."""
        engine = self.engine
        if self.asked and self.draw(turn, 5) < 0.04:
            name = f"r{int(self.draw(turn, 6) * len(self.asked))}"
            outcome = engine.abort(name, 0)
            self.aborted.append(name)
            self.note([outcome.finished] if outcome.finished else [])
            self.stop_block_if(outcome.replan)
        if self.draw(turn, 7) < 0.06:
            engine.deny_allocations(1 + int(self.draw(turn, 8) * 3), 0)
        running = engine.running_ids
        if running and self.draw(turn, 9) < 0.08:
            self.stop_block_if(engine.request_retraction(running[int(self.draw(turn, 10) * len(running))], 0))

    def lose(self, step_id: int, cause: FailureCause) -> None:
        engine = self.engine
        outcome = engine.lose_steps(StepFailure(step_id, cause, "planted"), 0)
        assert sum(end.reason is FinishReason.ERROR for end in outcome.finished) <= 1
        self.note(outcome.finished)
        self.num_lost += 1
        engine.check()
        restarted = cause in (FailureCause.HUNG, FailureCause.WORKER_LOST)
        if restarted:
            self.executor = ReferenceExecutor.for_engine(engine, HashDraft(MODEL, 0.7))
            self.executor._last_step_id = engine.last_step_id
        else:
            for _ in outcome.step_ids:
                self.executor.collect()
        engine.resume(0, restarted=restarted)

    def run(self) -> None:
        engine = self.engine
        for turn in range(4000):
            self.arrive(turn)
            if turn < CALM_FROM:
                self.disturb(turn)
            while (step := engine.plan(0)) is not None:
                self.executor.launch(step)
            engine.check()
            if not engine.num_uncommitted:
                assert engine.is_idle, "requests wait and nothing runs"
                if len(self.asked) == NUM_REQUESTS:
                    return
                continue
            oldest = engine.last_step_id - engine.num_uncommitted + 1
            if turn < CALM_FROM and self.draw(turn, 11) < 0.1:
                self.lose(oldest, tuple(FailureCause)[int(self.draw(turn, 12) * len(FailureCause))])
            else:
                self.note(engine.commit(self.executor.collect(), 0).finished)
            engine.check()
        raise AssertionError("no end")


def check_seed(seed: int) -> int:
    trouble = Trouble(seed)
    trouble.run()
    engine = trouble.engine
    assert engine.store.num_request_slots == 0
    for name, request in trouble.asked.items():
        end = trouble.ended[name]
        limit = engine.sizes.max_tokens(engine.config, request.prompt.length, request.max_tokens)
        assert end.tokens.tolist() == plain_greedy(MODEL, request, limit).tolist()[: end.num_output]
        if end.reason is FinishReason.LENGTH:
            assert end.num_output == limit
        else:
            assert name in trouble.aborted or end.reason is FinishReason.ERROR
    return trouble.num_lost


def test_eight_engines_in_trouble():
    assert sum(check_seed(seed) for seed in range(8)) > 24


@pytest.mark.slow
@pytest.mark.parametrize("fifty", range(6))
def test_three_hundred_engines_in_trouble(fifty):
    assert sum(check_seed(seed) for seed in range(50 * fifty, 50 * fifty + 50)) > 200
