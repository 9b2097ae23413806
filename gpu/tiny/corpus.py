"""The text that a pair learns: short Python modules that are made up, of a few kinds of class.

Which methods a class has is drawn; what follows from it is not, so that a small model can learn it within a minute: the
names of its attributes, of its methods and of the class itself come again and again. They become tokens of a byte-level
BPE vocabulary, saved as Hugging Face tokenizers are, and windows of a long row of them, drawn by number.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ...core.draws import Purpose, uniform

HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Whole modules, in the order of their numbers."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]  # every 10th module; no model learns from them

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in (*self.training, *self.held_out))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        return hashlib.sha256("".join((*self.training, *self.held_out)).encode()).hexdigest()


def make_corpus(num_modules: int) -> Corpus:
    """Return the first modules; those of a smaller corpus are among those of a larger one."""
    modules = [_module(random.Random(number)) for number in range(num_modules)]
    is_held_out = [number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for number in range(num_modules)]
    return Corpus(
        tuple(text for text, out in zip(modules, is_held_out, strict=True) if not out),
        tuple(text for text, out in zip(modules, is_held_out, strict=True) if out),
    )


# fmt: off
KINDS = (
    "account", "archive", "basket", "cache", "catalog", "channel", "connection", "counter", "document", "engine",
    "filter", "folder", "journal", "ledger", "library", "message", "node", "order", "parser", "queue", "reader",
    "record", "request", "router", "schedule", "server", "session", "station", "table", "task", "ticket", "worker",
    "writer",
)
NUMBERS = ("age", "count", "depth", "height", "level", "limit", "offset", "port", "score", "size", "total", "width")
WORDS = ("color", "format", "host", "key", "label", "mode", "name", "owner", "path", "title")
LISTS = ("items", "lines", "names", "parts", "rows", "values")
VALUES = {"number": ("8", "16", "80", "100", "128", "512"), "word": ('"first"', '"left"', '"main"', '"new"', '"red"')}
IMPORTS = ("json", "math", "os", "sys", "time")
# fmt: on
GET = '''
    def get_{name}(self):
        """Return the {name} of this {kind}."""
        return self.{name}
'''
SET = '''
    def set_{name}(self, {name}):
        """Change the {name} of this {kind}."""
        self.{name} = {name}
'''
ADD = """
    def add_{name}(self, {name}=1):
        if {name} < 0:
            raise ValueError("the {name} of a {kind} grows")
        self.{name} += {name}
"""
SHOW = """
    def show_{name}(self):
        print("{kind}", self.{name})
"""
APPEND = '''
    def add_{one}(self, {one}):
        """Add a {one} to the {name} of this {kind}."""
        self.{name}.append({one})
'''
FIND = """
    def find_{one}(self, index):
        try:
            return self.{name}[index]
        except IndexError:
            return None
"""
METHODS = {"number": (GET, ADD, SHOW), "word": (GET, SET, SHOW)}


def _module(draws: random.Random) -> str:
    """Return a module of one to three classes and a function that uses them."""
    kinds = draws.sample(KINDS, draws.choice((1, 2, 2, 3)))
    attributes = {kind: _attributes(draws) for kind in kinds}
    imports = "".join(f"import {name}\n" for name in sorted(draws.sample(IMPORTS, draws.choice((1, 2)))))
    parts = [imports, *(_class(draws, kind, attributes[kind]) for kind in kinds), _main(draws, attributes)]
    if draws.random() < 0.2:
        parts[1:] = reversed(parts[1:])
    return "\n\n".join(parts)


def _attributes(draws: random.Random) -> list[tuple[str, str]]:
    """Return name and kind of each argument that a class takes."""
    numbers = [(name, "number") for name in draws.sample(NUMBERS, draws.choice((1, 2)))]
    words = [(name, "word") for name in draws.sample(WORDS, draws.choice((0, 1, 1, 2)))]
    return draws.sample(numbers + words, len(numbers) + len(words))


def _class(draws: random.Random, kind: str, attributes: list[tuple[str, str]]) -> str:
    names = [name for name, _ in attributes]
    lists = draws.sample(LISTS, draws.choice((0, 1, 1)))
    lines = [f"class {kind.capitalize()}:"]
    if draws.random() < 0.7:
        lines += [f'    """The {kind} has a {" and a ".join(names)}."""', ""]
    lines += [f"    def __init__(self, {', '.join(names)}):"]
    lines += [f"        self.{name} = {name}" for name in names] + [f"        self.{name} = []" for name in lists]
    for name, attribute in attributes:
        methods = METHODS[attribute]
        for number in sorted(draws.sample(range(len(methods)), draws.choice((1, 2)))):
            lines += methods[number].format(kind=kind, name=name).splitlines()
    for name in lists:
        lines += (APPEND + FIND).format(kind=kind, name=name, one=name[:-1]).splitlines()
    return "\n".join(lines) + "\n"


def _main(draws: random.Random, attributes: dict[str, list[tuple[str, str]]]) -> str:
    lines = ["def main(argv):"]
    for kind, ones in attributes.items():
        values = [draws.choice(VALUES[attribute]) for _, attribute in ones]
        lines += [f"    {kind} = {kind.capitalize()}({', '.join(values)})"]
        lines += [f"    print({kind}.{draws.choice(ones)[0]})"]
    return "\n".join([*lines, "    return 0"]) + "\n"


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
# A conversation becomes a Python module: who speaks is a comment, what the assistant says is code.
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
