"""Random sessions of every family in float64: each token is the one that `transformers` chooses after the text before
it, with any draft, tree, batch, page, chunk and pool."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from kinds_of_drafts import DRAFTS
from small_checkpoint import VOCAB_SIZE, write_head, write_target
from wide_recurrence import wide_recurrence

SESSIONS = int(os.environ.get("SESSIONS", "15"))  # of each family
# transformers has no MiMo, and changes the rotation of longrope within a text.
WITH_REFERENCE = [label for label in SHAPES if label not in ("mimo", "phi3, longrope")]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]


def random_request(rng: random.Random, number: int) -> Request:
    """A prompt of few different tokens, so that look-ups find some."""
    known = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 100)))]
    tokens = [rng.choice(known) for _ in range(rng.randint(1, 40))]
    return Request(f"r{number}", Prompt.of_tokens(tokens), rng.randint(1, 30))


def random_options(rng: random.Random) -> tuple[dict, str | None]:
    name = rng.choice([None, *DRAFTS])
    options = {} if name is None else dict(DRAFTS[name])
    if "topk" in options and rng.random() < 0.5:
        options |= {"topk": 3, "steps": rng.randint(2, 4), "num_draft_tokens": rng.randint(4, 12)}
    elif "steps" in options and "topk" not in options:
        options["steps"] = rng.randint(1, 5)
    options |= {
        "page_size": rng.choice((1, 4)),
        "chunk_size": rng.choice((4, 7, 64)),
        "max_running": rng.randint(1, 4),
        "prefix_cache": rng.random() < 0.5,
        "overlap": rng.choice((None, True)),
        "multi_step_rounds": rng.choice((None, 1)),
        "kv_tokens": rng.choice((None, 160)),
    }
    return options, name


@pytest.mark.parametrize("label", WITH_REFERENCE)
@torch.no_grad()
def test_every_token_is_the_one_that_transformers_chooses(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    shape, rng = SHAPES[label], random.Random(label)
    target = write_target(tmp_path / "target", shape)
    heads = cache(lambda name: write_head(tmp_path / name, name))
    reference = getattr(transformers, shape.architecture).from_pretrained(
        target, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    compared = accepted = 0
    for number in range(SESSIONS):
        options, name = random_options(rng)
        draft = None if name in (None, "look-up") else heads(name) if name.startswith("EAGLE") else target
        requests = [random_request(rng, i) for i in range(rng.randint(1, 5))]
        session = DecodeSession.open(SessionOptions(target, draft=draft, dtype="float64", debug=True, **options))
        outputs = session.run(requests)
        accepted += (session.stats().accept_length or 0) > 1.5
        for request in requests:
            prompt, found = np.asarray(request.prompt.tokens), np.asarray(outputs[request.request_id].tokens)
            assert len(found), (number, options)
            with wide_recurrence(monkeypatch, reference):
                logits = reference(torch.from_numpy(np.concatenate([prompt, found]))[None]).logits[0]
            expected = logits[len(prompt) - 1 : -1].argmax(-1)
            assert found.tolist() == expected.tolist(), (number, name, options)
            compared += len(found)
    assert compared > 20 * SESSIONS and accepted
