"""Sessions of every family in float64: no kind of draft changes the text, and a draft that is the target itself is
always right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from family_shapes import SHAPES, family_of
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.families import DECODED
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from foredraft.gpu.session.text import Tokenizer
from kinds_of_drafts import DRAFTS, ITSELF, unequal_rows
from small_checkpoint import write_head, write_target

LINES = ['{"prompt": "def add(a, b):", "max_tokens": 20}', '{"tokens": [5, 6, 7], "max_tokens": 12}']

BY_CONFIDENCE: dict[str, dict] = {
    "EAGLE3, by confidence": {
        "policy": "confidence",
        "adaptive": '{"1": {"candidate_steps": [1, 2]}}',
        "max_running": 2,
    },
    "itself, by confidence": {"policy": "confidence", "steps": 2, "max_running": 2},
}


def test_every_family_is_here():
    assert {family_of(label) for label in SHAPES} == set(DECODED)


# Whose layers compute what others' do not; the rest runs at night.
FAST = (
    "mixtral",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "olmo3",
    "granite",
    "glm4",
    "ministral3",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
)


@pytest.mark.fast("deepseek_v3", ci="*")
@pytest.mark.parametrize(
    "label", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_text_with_any_draft_is_the_plain_text(label: str, tmp_path: Path):
    shape = SHAPES[label]
    target = write_target(tmp_path / "target", shape)
    assert ModelConfig.from_directory(target) == shape, "the test runs another model than it writes"
    requests = make_requests(read_prompts(LINES, "f"), Tokenizer.load(target), RequestDefaults(), "f")

    def run(row_lengths=None, **options) -> tuple[list, float, int]:
        # One request alone goes through NumPy where the layers can, two through torch; chunks of 4 are shorter than the
        # windows.
        session = DecodeSession.open(SessionOptions(target, dtype="float64", chunk_size=4, **options))
        if row_lengths is not None:
            session.engine.rounds.row_lengths = row_lengths
        outputs = session.run(requests)
        alone = session.run([replace(requests[0], request_id="alone")])
        return [outputs, alone], session.stats().accept_length, session.own_executor.counters.rounds

    plain, *_ = run()
    for name, options in (DRAFTS | BY_CONFIDENCE).items():
        draft = {"draft": target} if name.startswith("itself") else {}
        if name.startswith("EAGLE"):
            draft = {"draft": write_head(tmp_path / name, name.partition(",")[0])}
        same, accept_length, rounds = run(**options, **draft)
        assert same == plain, name
        if name == ITSELF:
            assert accept_length > 3, "its own draft is always right, but for what a request's end cuts off"
        same, _, more_rounds = run(unequal_rows, **options, **draft)
        assert same == plain, f"{name}, rows of unequal lengths"
        assert more_rounds > rounds or name != ITSELF, "shorter rows take more rounds of a draft that is always right"
