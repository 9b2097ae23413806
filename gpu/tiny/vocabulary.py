"""A byte-level BPE vocabulary of the corpus, saved as Hugging Face tokenizers are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# A conversation becomes a Python file: who speaks is a comment, what the assistant says is code.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}# {{ message['role'] }}: {{ message['content'] | replace('\\n', '\\n# ') }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def train_vocabulary(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al., arXiv 1508.07909, over bytes): every text can be encoded and comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID, "the end of text is the first token"
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Return all texts as one row of tokens, int64 [n], with the end of text after each."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.concatenate([np.array([*item.ids, END_OF_TEXT_ID], np.int64) for item in encoded])


def save_vocabulary(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID, "do_sample": False}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_vocabulary(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
