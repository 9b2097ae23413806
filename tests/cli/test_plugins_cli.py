"""Installed packages with an algorithm: whatever is wrong with one is a message and exit code 2."""

from __future__ import annotations

import pytest

GOOD = """
import numpy as np
from foredraft.core.algorithm.builtin import LookupDrafting
from foredraft.core.algorithm.proposer import Proposal

class Proposer:
    def open_row(self, row): pass
    def observe(self, row, tokens): pass
    def first_relay(self, rows): return {}
    def propose(self, request):
        shape = (len(request.rows), request.num_draft_tokens - 1)
        return Proposal(np.full(shape, TOKEN), np.tile(np.arange(shape[1]), (shape[0], 1)))

TOKEN = 3

class Mine(LookupDrafting):
    def make_proposer(self, shape): return Proposer()
"""


@pytest.fixture
def install(tmp_path, monkeypatch, forget):
    """`install(code)`: a distribution whose entry point MINE is the class `Mine` of this code."""
    number = iter(range(100))

    def write(code: str) -> None:
        site = tmp_path / f"site{next(number)}"
        module = f"mine_{site.name}_{tmp_path.name}".replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[foredraft.algorithms]\nMINE = {module}:Mine\n")
        (site / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(site)

    return write


SIMULATE = ("simulate", "--quiet", "--set", "workload.num_requests=5", "--set", "speculation.algorithm=MINE")


def generate(models, *more):
    line = (
        "generate",
        "--model",
        models["target"],
        "--algorithm",
        "mine",
        "--prompt",
        "for i in range",
        "--max-tokens",
        12,
    )
    return (*line, "--dtype", "float64", "--device", "cpu", "--quiet", *more)


def test_a_good_one_serves(command, install, models):
    install(GOOD)
    assert command(*SIMULATE).code == 0
    plain = command(*generate(models, "--algorithm", "NONE"))
    drafted = command(*generate(models))
    assert drafted.code == 0, drafted.err
    assert drafted.out == plain.out


def test_a_mode_that_the_algorithm_cannot_have_is_noted_or_refused(command, install, models):
    install(GOOD.replace("class Mine(LookupDrafting):", "class Mine(LookupDrafting):\n    supports_overlap = False"))
    reason = "algorithm MINE does not support overlap mode"
    told = command(*SIMULATE)
    assert ", synchronous, seed 0" in " ".join(told.out.split())
    assert told.code == 0 and f"Note: the mode is synchronous: {reason}." in " ".join(told.out.split())
    refused = command(*SIMULATE, "--set", "engine.mode=overlap")
    assert refused.code == 2 and f"engine.mode: 'overlap' has no effect: {reason}" in refused.err
    assert command(*SIMULATE, "--set", "engine.mode=synchronous").code == 0
    refused = command(*generate(models, "--overlap"))
    assert refused.code == 2 and f"overlap: has no effect: {reason}" in refused.err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('not on this machine')", "RuntimeError: not on this machine"),
        ("nothing = 1", "has no attribute 'Mine'"),
        ("def (", "SyntaxError"),
        (GOOD.replace("observe(self, row, tokens)", "observe(self, row)"), "Proposer.observe: takes (row)"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_the_reason(refused, install, code, words):
    install(code)
    message = refused(*SIMULATE)
    assert words in message and "speculation.algorithm" in message
    assert all(line.startswith("foredraft: ") for line in message.splitlines())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("return Proposal(", "return ("), "propose gave tuple"),
        (("- 1)\n", "+ 4)\n"), "propose gave tokens int64[1, 9], expected integers [1, 4]"),
        (("np.arange(shape[1])", "np.arange(1, shape[1] + 1)"), "the number of an earlier node"),
        (("return Proposal(", "raise KeyError(request.rows[0]) #"), "propose raised KeyError"),
        (
            ("def open_row(self, row): pass", "def open_row(self, row): return 1 / 0"),
            "open_row raised ZeroDivisionError",
        ),
    ],
)
def test_one_that_fails_while_it_decodes_ends_the_run_with_its_name(command, install, models, change, words):
    install(GOOD.replace(*change))
    outcome = command(*generate(models, "--steps", 4))
    assert outcome.code == 2
    assert words in outcome.err and "algorithm MINE" in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize("token", ["-1", "1 << 40", "10 ** 6"])
def test_drafts_that_are_no_tokens_are_rejected(command, install, models, token):
    install(GOOD.replace("TOKEN = 3", f"TOKEN = {token}"))
    plain = command(*generate(models, "--algorithm", "NONE"))
    drafted = command(*generate(models))
    assert (drafted.code, drafted.out) == (0, plain.out)
