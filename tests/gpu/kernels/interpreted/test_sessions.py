"""Whole sessions with only interpreted Triton kernels. They test how the kernels work together, including the relay
cells of captured rounds."""

from __future__ import annotations

import pytest
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest import sessions
from foredraft.gpu.selftest.steps import Context, State, run_step


@pytest.mark.slow
@pytest.mark.parametrize("title", ["sessions: float32, plain", "modes: graphs = eager, STANDALONE chain"])
def test_the_tokens_have_the_greatest_logits(title, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.gpu.session.devices.ops_for", lambda device: TritonOps())
    monkeypatch.setattr(sessions, "NUM_REQUESTS", 2)
    (step,) = [step for step in sessions.session_steps(Context("cpu", tmp_path)) if step.title == title]
    outcome = run_step(step)
    assert outcome.state is State.PASSED, outcome.traceback
