"""What computes for too long is interrupted soon; what waits, later: a busy machine is no component that hangs."""

import time

import pytest
from foretoken.properties.harness.alarm import PATIENCE, Hanging, alarm


def test_who_only_waits_a_little_is_left_alone():
    with alarm(0.3):
        time.sleep(0.45)  # longer than the limit, far less than the patience; nothing is computed
    assert PATIENCE * 0.3 > 1


def test_who_waits_for_ever_is_interrupted():
    begin = time.process_time()
    with pytest.raises(Hanging), alarm(0.02):
        time.sleep(60)
    assert time.process_time() - begin < 1


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
