"""Checkpoints small enough to make in a moment: a byte-level tokenizer with a chat template, random weights, in
Hugging Face form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from foredraft.gpu.models.checkpoint import random_head, random_weights, save_draft, save_target
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.models.heads.config import HeadConfig
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.text import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = ["def add(a, b):\n    return a + b\n", "The naïve café costs 3 €. 漢字 😀\n", "for i in range(10): print(i)\n"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 320
CONTEXT = 256
SHAPE = ModelConfig(
    architecture=LLAMA,
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=CONTEXT,
)


def train_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: every text has tokens, and many a token is no whole character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def write_tokenizer(directory: Path, **settings: object) -> Path:
    """tokenizer.json and tokenizer_config.json; `settings` replace entries of the latter, None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(directory / "tokenizer.json"))
    known = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT, **settings}
    kept = {key: value for key, value in known.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return directory


def small_tokenizer(directory: Path, **settings: object) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(directory, **settings))


def write_target(directory: Path, shape: ModelConfig = SHAPE, seed: int = 1) -> Path:
    """A model that does not repeat itself, with its tokenizer."""
    model = random_weights(shape, ops_for("cpu"), "cpu", torch.float32, seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(8.0)
    save_target(model, write_tokenizer(directory))
    return directory


def write_standalone(directory: Path, seed: int = 2) -> Path:
    """A draft of one layer and another hidden size."""
    return write_target(directory, replace(SHAPE, hidden_size=16, head_dim=4, num_layers=1), seed)


def write_head(directory: Path, algorithm: str = "EAGLE3", num_heads: int = 2) -> Path:
    """Write a random head; `num_heads` of multi-layer EAGLE."""
    ops = ops_for("cpu")
    target = random_weights(SHAPE, ops, "cpu", torch.float32, 1)
    model = replace(SHAPE, num_layers=1)
    aux = (1, 2, 3) if algorithm == "EAGLE3" else ()
    heads = num_heads if algorithm == "MULTI_LAYER_EAGLE" else 1
    config = HeadConfig(algorithm, model, SHAPE.hidden_size, VOCAB_SIZE, aux, num_heads=heads)
    save_draft(random_head(config, target, seed=3), directory)
    return directory
