"""A request's way from its arrival at a server to the scheduler's queue: the front end, and the next look at the queue.

The front end serves one request after the other. The scheduler looks at what the front end has passed on before each
plan, or only every `FrontEnd.poll_steps` decode steps. It also looks after a step with prompts, and when nothing runs
(sgl-project/sglang 0.5.23, managers/scheduler_components/recv_skipper.py, with its default weights).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...core.contract.step import Step
from ..cost.host import FrontEnd
from .clock import Arguments, Environment, call_at


class Intake:
    """Holds the messages for one engine until the front end has served them and the scheduler looks at its queue.

    `on_waiting` is called when a message begins to wait for the scheduler.
    """

    def __init__(self, env: Environment, front_end: FrontEnd, on_waiting: Callable[[], None], lane: int = 0) -> None:
        self.env = env
        self.front_end = front_end
        self._on_waiting = on_waiting
        self._lane = lane
        self._front_end_free_ns = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._polls = front_end.poll_steps > 1
        self._num_launched = 0  # decode steps since the last look; a multi-step counts its rounds
        self._look_is_due = True  # whatever the count: nothing has run, or a step with prompts has

    # -- messages -----------------------------------------------------------------------------------------------------

    def pass_on(self, num_tokens: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Call `deliver(*arguments)` when the scheduler sees the message. `num_tokens`: of a prompt; 0: a cancel."""
        cost, now_ns = self.front_end, self.env.now
        served_ns = cost.request_ns + cost.token_ns * num_tokens if num_tokens else 0
        self._front_end_free_ns = max(self._front_end_free_ns, now_ns) + served_ns
        if self._front_end_free_ns > now_ns:
            call_at(self.env, self._front_end_free_ns, self._queue, deliver, *arguments, lane=self._lane)
        else:
            self._queue(deliver, *arguments)

    def _queue(self, deliver: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        if not self._polls:
            deliver(*arguments)
            return
        self._waiting.append(lambda: deliver(*arguments))
        self._on_waiting()

    @property
    def is_waiting(self) -> bool:
        """Whether messages wait for the scheduler's next look."""
        return bool(self._waiting)

    def release(self) -> None:
        """Deliver all messages that wait."""
        while self._waiting:
            self._waiting.popleft()()

    # -- the scheduler's looks ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Deliver all messages that wait, if the scheduler looks at its queue before the plan that comes now."""
        if not self._polls:
            return
        if self._look_is_due:
            self._num_launched, self._look_is_due = 0, False
        self._num_launched %= self.front_end.poll_steps
        if not self._num_launched:
            self.release()

    def launched(self, step: Step) -> None:
        """Count a step that is launched; of a multi-step, its first round."""
        self._num_launched += 1
        self._look_is_due = self._look_is_due or step.prefill is not None

    def count_rounds(self, rounds: int) -> None:
        """Count the rounds of a multi-step after its first."""
        self._num_launched += rounds

    def rounds_before_look(self, least: int) -> int:
        """Return after how many rounds of the running multi-step, at least `least`, the next plan looks at the
        queue."""
        if self._look_is_due:
            return least
        return least + -(self._num_launched + least - 1) % self.front_end.poll_steps
