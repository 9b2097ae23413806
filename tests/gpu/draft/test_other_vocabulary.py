"""A draft model of another tokenizer: it drafts the tokens that both spell alike, and changes no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.models.decoder import Decoder, TokenTwins
from foredraft.gpu.session.text import spelled_alike
from matrix_cells import noisy_copy
from serving import Way, serve
from serving_matrix import VOCAB_SIZE
from tokenizers import decoders, models

PROMPTS = [[3, 14, 15, 9, 2], [1, 2], [7, 7, 20, 5, 5, 23, 0, 11]]


def with_permuted_tokens(num_alike: int) -> Decoder:
    """A copy of the target whose token j is the target's token order[j]; both spell the first ones alike."""
    draft = noisy_copy.__wrapped__(0, 0.0)  # one of its own: other tests have the kept one
    order = torch.as_tensor(np.random.default_rng(2).permutation(VOCAB_SIZE))
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.shape[0] == VOCAB_SIZE:
                weight.copy_(weight[order])
                assert "embed" in name or "head" in name
    own = torch.arange(num_alike)
    read_as = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    read_as[order[own]] = own
    draft.twins = TokenTwins(read_as, own, order[own])
    return draft


def served(draft: Decoder, rule: AcceptRule = AcceptRule.TARGET, temperature: float = 0.0, topk: int = 1, **more):
    requests = [Request(f"r{i}", Prompt.of_tokens(prompt), 12) for i, prompt in enumerate(PROMPTS)]
    requests = [replace(one, sampling=replace(one.sampling, temperature=temperature)) for one in requests]
    shape = {"steps": 3} if topk == 1 else {"steps": 2, "topk": topk, "num_draft_tokens": 7}
    return serve(Way("STANDALONE", draft, shape, rule=rule), requests, disturbance=None, **more)


@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_with_permuted_tokens_drafts_as_the_one_with_the_targets(topk):
    drafts = noisy_copy(0, 0.0), with_permuted_tokens(VOCAB_SIZE)  # copied before the target is laid out
    plain, permuted = (served(draft, topk=topk) for draft in drafts)
    assert permuted.tokens == plain.tokens
    correct = [run.engine.controller.metrics().correct_drafts for run in (plain, permuted)]
    assert correct[0] == correct[1] > 2


def test_tokens_without_a_twin_are_never_drafted_and_the_text_stays():
    drafts, proposed = (noisy_copy(0, 0.0), with_permuted_tokens(16)), set()
    plain = served(drafts[0])

    def note(executor):
        propose = executor.draft.propose

        def noted(*arguments):
            tree = propose(*arguments)
            proposed.update(tree.tokens[:, 1:].flatten().tolist())
            return tree

        executor.draft.propose = noted

    some = served(drafts[1], before=note)
    assert some.tokens == plain.tokens
    assert proposed and proposed <= set(drafts[1].twins.target_ids.tolist())


def test_drafts_are_drawn_from_the_tokens_alike():
    run = served(with_permuted_tokens(16), AcceptRule.BLOCK, temperature=1.0)
    assert run.engine.controller.metrics().correct_drafts > 3


def test_spellings_are_compared_as_bytes_and_stand_ins_are_the_longest_endings(tmp_path):
    """Ġ and ▁ begin a word; <0x0A> is a byte; a special token stands for itself; an unknown one for its ending."""
    byte_level = {"</s>": 0, "Ġthe": 1, "e": 2, "xyz": 3, "Ċ": 4, "yz": 5}
    byte_fallback = {"<0x0A>": 0, "yz": 1, "z": 2, "▁the": 3, "</s>": 4, "other": 5, "more": 6}
    for name, vocabulary, decoder in (
        ("target", byte_level, decoders.ByteLevel()),
        ("draft", byte_fallback, decoders.ByteFallback()),
    ):
        made = tokenizers.Tokenizer(models.WordLevel(vocabulary, "</s>"))
        made.decoder = decoder
        made.add_special_tokens(["</s>"])
        (tmp_path / name).mkdir()
        made.save(str(tmp_path / name / "tokenizer.json"))
    alike = spelled_alike(tmp_path / "target", tmp_path / "draft", 8, 7)
    assert dict(zip(alike.own_ids.tolist(), alike.target_ids.tolist(), strict=True)) == {0: 4, 1: 5, 3: 1, 4: 0}
    assert alike.read_as.tolist() == [4, 3, 0, 1, 0, 1, 0, 0]
