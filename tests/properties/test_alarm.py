"""What computes for too long is interrupted soon; what waits, later: a busy machine is no component that hangs."""

import signal
import time

import pytest
from foredraft.properties.harness.suite import PATIENCE, Hanging, alarm


class Clocks:
    """What the alarm reads instead of the machine's clocks, in seconds."""

    def __init__(self, monkeypatch):
        self.computed = self.passed = 100.0
        monkeypatch.setattr(time, "thread_time", lambda: self.computed)
        monkeypatch.setattr(time, "monotonic", lambda: self.passed)

    def ring_after(self, *, computed, passed):
        self.computed += computed
        self.passed += passed
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize(
    ("computed", "passed"),
    [(0.0, 450.0), (269.0, 450.0), (0.0, PATIENCE * 300 - 1)],
    ids=["waits", "computes for less than nine tenths", "waits for almost as long as it may"],
)
def test_who_only_waits_a_little_is_left_alone(monkeypatch, computed, passed):
    clocks = Clocks(monkeypatch)
    with alarm(300):
        clocks.ring_after(computed=computed, passed=passed)


@pytest.mark.parametrize(("computed", "passed"), [(270.0, 300.0), (0.0, PATIENCE * 300)], ids=["computes", "waits"])
def test_who_computes_or_waits_for_too_long_is_interrupted(monkeypatch, computed, passed):
    clocks = Clocks(monkeypatch)
    with pytest.raises(Hanging), alarm(300):
        clocks.ring_after(computed=computed, passed=passed)


def test_who_waits_for_ever_is_interrupted():
    with pytest.raises(Hanging), alarm(0.02):
        time.sleep(600)


def test_who_catches_everything_is_interrupted_again():
    with pytest.raises(Hanging), alarm(0.05):
        caught = 0
        while True:
            try:
                while True:
                    pass
            except Hanging:
                caught += 1
                if caught == 2:
                    raise
