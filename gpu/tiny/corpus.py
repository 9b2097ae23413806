"""The text that a pair learns: the Python standard library's own source, which every machine that runs Foredraft has.

It becomes tokens of a byte-level BPE vocabulary, saved as Hugging Face tokenizers are, and windows of a long row of
them, drawn by number.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ...core.draws import Purpose, uniform
from ...core.errors import ForedraftError

# Tests repeat themselves, and not every installation has them; site-packages is not the standard library.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"})
HELD_OUT_EVERY = 10
MIN_FILE_BYTES = 400  # shorter files are empty packages
MAX_FILE_BYTES = 60_000  # a longer one would be a large part of a small corpus


class NoCorpus(ForedraftError):
    """This Python has no source of its standard library."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Whole files, in the order of their names."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]  # every 10th file; no model learns from them
    digest: str  # SHA-256 of all of it, in hexadecimal

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in (*self.training, *self.held_out))


def read_corpus(num_bytes: int, root: Path | None = None) -> Corpus:
    """Return the first files of the standard library that fit into `num_bytes` bytes, by name.
    Raises NoCorpus if there are too few."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    training: list[str] = []
    held_out: list[str] = []
    digest = hashlib.sha256()
    left = num_bytes
    for number, text in enumerate(_texts(root)):
        raw = text.encode()
        if len(raw) > left:
            break
        left -= len(raw)
        digest.update(raw)
        (held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else training).append(text)
    if not held_out:
        raise NoCorpus(f"{root}: no source of the standard library here ({len(training)} files); a pair learns from it")
    return Corpus(tuple(training), tuple(held_out), digest.hexdigest())


def _texts(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(folder, name)
            # Files named after the machine that built this Python differ from one machine to the next.
            if path.suffix != ".py" or name.startswith("_sysconfigdata"):
                continue
            if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
                continue
            try:
                yield path.read_text(encoding="utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:  # a few files declare another encoding
                continue


def corpus_windows(tokens: Tensor, batch_size: int, window: int, seed: int, part: int, step: int) -> Tensor:
    """Return `batch_size` windows of the tokens (int64 [n]) for step `step` of the pair's part `part`, int64
    [batch_size, window]."""
    coins = uniform(seed, Purpose.MODEL, np.arange(batch_size), step, lane=part)
    starts = torch.from_numpy((coins * (tokens.shape[0] - window)).astype(np.int64)).to(tokens.device)
    return tokens[starts[:, None] + torch.arange(window, device=tokens.device)]


def rows_of(texts: Tensor, batch_size: int, step: int) -> Tensor:
    """Return the next `batch_size` of the texts [n, window], again from the first after the last."""
    first = step * batch_size
    index = torch.arange(first, first + batch_size, device=texts.device) % texts.shape[0]
    return texts[index]


def spread_prompts(tokens: Tensor, num_prompts: int, prompt_len: int) -> Tensor:
    """Return beginnings of texts, spread evenly over the row of tokens, int64 [num_prompts, prompt_len]."""
    last = tokens.shape[0] - prompt_len
    assert last >= 0, f"{tokens.shape[0]} tokens are fewer than a prompt's {prompt_len}"
    starts = torch.linspace(0, last, num_prompts, dtype=torch.float64, device=tokens.device).long()
    return tokens[starts[:, None] + torch.arange(prompt_len, device=tokens.device)]


def most_frequent(rows: Sequence[Tensor], vocab_size: int, num_tokens: int) -> Tensor:
    """Return the `num_tokens` most frequent tokens over all rows, ascending, int64 [num_tokens];
    ties take the lower token."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        counts += torch.bincount(row.reshape(-1).cpu(), minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices
    return torch.sort(order[:num_tokens]).values


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
    """Train byte-level BPE (Sennrich et al., arXiv 1508.07909, over bytes):
    every text can be encoded and comes back as it was."""
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
