"""What a pair learns from, and that training and measuring use what drafting would compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.tiny.continuations import continue_texts
from foredraft.gpu.tiny.corpus import (
    END_OF_TEXT_ID,
    corpus_windows,
    encode_texts,
    make_corpus,
    rows_of,
    save_vocabulary,
    spread_prompts,
    train_vocabulary,
)
from foredraft.gpu.tiny.dense import BlockAttention, DenseAttention
from foredraft.gpu.tiny.drafting import accept_length, distillation_loss, measure_drafts, propose, teach
from foredraft.gpu.tiny.pair import new_block_drafter, new_eagle3, new_multi_layer_eagle, new_standalone, new_target
from foredraft.gpu.tiny.sizes import NANO

TEXT = "def greet(name):\n    return f'Grüße, {name} 🎈'\n"


def lively_target(seed: int) -> Decoder:
    """An untrained target whose layers matter; those of a new one are silent."""
    target = new_target(NANO, seed)
    initialize(target, seed, std=0.3)
    return target


def test_corpus_is_the_same_everywhere_and_held_out_modules_are_not_learnt():
    corpus = make_corpus(40)
    assert corpus == make_corpus(40) and (len(corpus.training), len(corpus.held_out)) == (36, 4)
    assert not set(corpus.training) & set(corpus.held_out)
    larger = make_corpus(60)
    assert larger.training[:36] == corpus.training and larger.digest != corpus.digest
    for text in (*larger.training, *larger.held_out):
        compile(text, "<module>", "exec")
        assert "class " in text and "def main(argv):" in text


@pytest.mark.xdist_group("transformers")  # one worker imports it
def test_vocabulary_encodes_every_text_and_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary = train_vocabulary(make_corpus(200).training, 400)
    assert vocabulary.get_vocab_size() == 400
    tokens = encode_texts(vocabulary, [TEXT, TEXT])
    assert tokens.dtype == np.int64 and list(tokens).count(END_OF_TEXT_ID) == 2 and tokens[-1] == END_OF_TEXT_ID
    assert vocabulary.decode(tokens[: len(tokens) // 2 - 1].tolist()) == TEXT
    save_vocabulary(vocabulary, tmp_path, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT) == vocabulary.encode(TEXT).ids and theirs.eos_token_id == END_OF_TEXT_ID
    messages = [{"role": "user", "content": "two\nlines"}, {"role": "assistant", "content": "x = 1\n"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "# user: two\n# lines\nx = 1\n<|endoftext|>"
    asked = theirs.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "# user: two\n# lines\n\n"


def test_windows_depend_on_seed_part_and_step_alone():
    tokens = torch.arange(1000)
    first = corpus_windows(tokens, 4, 16, seed=1, part=0, step=3)
    assert first.shape == (4, 16) and bool((first.diff(dim=1) == 1).all())
    assert torch.equal(first, corpus_windows(tokens, 4, 16, seed=1, part=0, step=3))
    for other in ({"seed": 2}, {"part": 1}, {"step": 4}):
        assert not torch.equal(first, corpus_windows(tokens, 4, 16, **{"seed": 1, "part": 0, "step": 3, **other}))
    texts = torch.arange(6)[:, None]
    assert [rows_of(texts, 4, step).flatten().tolist() for step in (0, 1)] == [[0, 1, 2, 3], [4, 5, 0, 1]]
    assert spread_prompts(tokens, 3, 10)[:, 0].tolist() == [0, 495, 990]


@pytest.fixture(scope="module")
def models():
    """An untrained target in float64 with its drafts, and two texts."""
    target = lively_target(0).double()
    target.dtype = torch.float64
    heads = [new_eagle3(NANO, target, torch.arange(0, 384), 1), new_multi_layer_eagle(NANO, target, 2)]
    heads.append(new_block_drafter(NANO, target, 3))
    texts = torch.randint(0, NANO.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    return target, heads, texts


def test_a_configuration_says_whether_the_output_layer_is_the_embedding(models):
    """Other loaders go by it: a head that is taken for tied would draft with its embedding instead of its
    own output layer."""
    target, heads, _ = models
    written = [model.config.to_dict() for model in (target, *heads)]
    assert [config["tie_word_embeddings"] for config in written] == [True, False, False, False]
    assert [config["num_hidden_layers"] for config in written] == [NANO.target.num_layers, 1, 1, 1]


@torch.no_grad()
def test_unrolled_proposals_are_those_of_drafting_one_token_after_another(models):
    """The slow way for every place: true states up to slot j, then the head's own outputs."""
    target, (head, *_), texts = models
    _, captured = teach(target, texts, head.aux_layers)
    for step, proposals in enumerate(propose(head, texts, captured, 3)):
        assert proposals.first == step + 2
        for begin in range(texts.shape[1] - 2 - step):
            for row in range(2):
                hidden = head.prepare_hidden(captured[row, : begin + 1])
                for _ in range(step + 1):
                    tokens = texts[row, 1 : 1 + len(hidden)]
                    out = head.forward(tokens, hidden, DenseAttention([len(tokens)]))
                    hidden = torch.cat([hidden, out.hidden[-1:]])
                torch.testing.assert_close(proposals.logits[row, begin], head.logits(out.logits_hidden[-1:])[0])


@torch.no_grad()
def test_head_proposals_take_the_state_of_the_head_before_a_slot_earlier(models):
    target, (_, heads, _), texts = models
    _, captured = teach(target, texts)
    first, second = propose(heads, texts, captured, 2)
    for row in range(2):
        tokens, attention = texts[row, 1:-1], DenseAttention([texts.shape[1] - 2])
        own = heads.forward(tokens, captured[row, :-2], attention, 0)
        torch.testing.assert_close(first.logits[row], heads.logits(own.logits_hidden))
        later = torch.cat([torch.zeros_like(own.hidden[:1]), own.hidden[:-1]])
        following = heads.forward(tokens, later, attention, 1)
        torch.testing.assert_close(second.logits[row], heads.logits(following.logits_hidden)[1:])


@torch.no_grad()
@pytest.mark.parametrize("every", [1, 3])
def test_block_proposals_are_those_of_one_block_behind_each_text(models, every):
    target, (*_, head), texts = models
    _, captured = teach(target, texts, head.aux_layers)
    for step, proposals in enumerate(propose(head, texts, captured, 3, every)):
        assert proposals.first == step + 2
        for place in range(proposals.logits.shape[1]):
            anchor = 1 + place * every
            for row in range(2):
                attention = BlockAttention(torch.tensor([[anchor]]), anchor, 4, head.is_causal)
                head.keep_context(head.prepare_hidden(captured[row, :anchor]), attention)
                tokens = torch.tensor([[int(texts[row, anchor]), *[head.mask_token] * 3]])
                wanted = head.logits(head.run_block(tokens, attention)[0])[step + 1]
                torch.testing.assert_close(proposals.logits[row, place], wanted)
        assert anchor + every + step + 1 >= texts.shape[1]


@torch.no_grad()
def test_a_draft_that_is_the_target_agrees_everywhere():
    target = lively_target(0)
    prompts = torch.randint(1, NANO.vocab_size, (3, 4), generator=torch.Generator().manual_seed(1))
    texts = continue_texts(target, prompts, 24)
    heads = new_multi_layer_eagle(replace(NANO, num_heads=3), target, 9)
    drafts = {"same": (target, heads, (1, 3)), "other": (heads, heads, (1, 3))}
    found = measure_drafts(target, drafts, texts, 4)
    quality, other = found["same"], found["other"]
    assert quality.agreement == 1.0 and quality.accept_lengths == {1: 2.0, 3: 4.0}
    assert other.agreement < 0.2 and other.accept_lengths[3] < 1.5
    # Before its training "same" was "other", which has learnt nothing since.
    assert quality.has_learnt and quality.untrained_agreement == other.agreement
    assert not other.has_learnt and other.untrained_agreement == other.agreement


def test_accept_length_counts_rounds():
    matches = np.zeros((2, 1, 9), bool)
    matches[0, 0, [0, 3, 4]] = True
    matches[1, 0, [1, 2, 5]] = True  # step 1 at token 2 does not count: step 0 missed token 1
    # Rounds begin at 0 (two accepted), 3 (one accepted; step 1 misses token 4), 5, 6: tokens 3 + 2 + 1 + 1.
    assert accept_length(matches) == pytest.approx(7 / 4)
    assert accept_length(np.ones((3, 2, 20), bool)) == 4.0
    assert accept_length(np.zeros((3, 2, 20), bool)) == 1.0


@torch.no_grad()
def test_continuations_are_the_argmax_of_whole_passes():
    target = lively_target(3)
    prompts = torch.randint(1, NANO.vocab_size, (3, 5), generator=torch.Generator().manual_seed(1))
    texts = continue_texts(target, prompts, 16)
    logits, _ = teach(target, texts)
    assert torch.equal(texts[:, :5], prompts)
    assert torch.equal(texts[:, 5:], logits[:, 4:-1].argmax(-1))
    sampled = [continue_texts(target, prompts, 16, 1.0, seed) for seed in (1, 1, 2)]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])


def test_distillation_needs_the_target_and_teaches_only_the_draft():
    target = lively_target(0)
    draft = new_standalone(NANO, 1).requires_grad_(True)
    texts = torch.randint(0, NANO.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = distillation_loss(target, draft, texts, 1, 0.8)
    loss.backward()
    assert all(weight.grad is not None for weight in draft.parameters()) and bool(draft.embed_weight.grad.any())
    assert all(weight.grad is None for weight in target.parameters())
    # The target itself is the best draft: its loss is the entropy half and the first choice's half.
    own = distillation_loss(target, target, texts, 1, 0.8)
    logits, _ = teach(target, texts)
    logs = logits[:, :-1].log_softmax(-1)
    expected = 0.5 * (-(logs.exp() * logs).sum(-1) - logs.max(-1).values).mean()
    torch.testing.assert_close(own, expected, rtol=1e-2, atol=1e-2)  # products may be in bfloat16
    assert float(own) < float(loss.detach())
