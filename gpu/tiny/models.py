"""The models of a pair, with their first weights: a target, and three kinds of draft for it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..models.checkpoint import random_head, random_weights
from ..models.config import LLAMA, ModelConfig
from ..models.decoder import Decoder
from ..models.eagle import DraftHead, Eagle3Head, MultiLayerEagle
from ..models.head_config import EAGLE3, MULTI_LAYER_EAGLE, HeadConfig, default_aux_layers
from ..ops.torch_ops import TorchOps
from .sizes import TinyShape, TinySize
from .vocabulary import END_OF_TEXT_ID


def new_target(size: TinySize, seed: int, device: str) -> Decoder:
    """Return a Llama. Training needs gradients, so the operations are the plain ones on every device."""
    return _language_model(size, size.target, seed, device)


def new_standalone(size: TinySize, seed: int, device: str) -> Decoder:
    """Return a smaller Llama of the same vocabulary."""
    return _language_model(size, size.standalone, seed, device)


def new_eagle3(size: TinySize, target: Decoder, vocabulary: Tensor, seed: int) -> Eagle3Head:
    """Make an EAGLE-3 head over the tokens `vocabulary` (int64 [draft vocabulary], ascending); its output layer begins as the target's."""
    aux_layers = default_aux_layers(target.num_layers)
    head = _head(EAGLE3, target, seed, draft_vocab_size=size.draft_vocab_size, aux_layers=aux_layers)
    assert isinstance(head, Eagle3Head)
    head.set_vocabulary(vocabulary)
    with torch.no_grad():
        head.lm_head_weight.copy_(target.output_embedding[vocabulary.to(target.device)])
    return head


def new_multi_layer_eagle(size: TinySize, target: Decoder, seed: int) -> MultiLayerEagle:
    """Return one EAGLE head per step; embeddings and output layer are the target's."""
    head = _head(MULTI_LAYER_EAGLE, target, seed, draft_vocab_size=target.vocab_size, num_heads=size.num_heads)
    assert isinstance(head, MultiLayerEagle)
    return head


def _head(algorithm: str, target: Decoder, seed: int, **sizes: Any) -> DraftHead:
    """Return a head with a layer of the target's shape."""
    layer = replace(target.config, num_layers=1, tied_embeddings=False)
    return random_head(HeadConfig(algorithm, layer, target.hidden_size, **sizes), target, seed)


def _language_model(size: TinySize, shape: TinyShape, seed: int, device: str) -> Decoder:
    """Make a model whose layers add nothing at first, so that the token is not lost in the noise of many of them."""
    model = random_weights(_llama(size, shape), TorchOps(), device, torch.float32, seed)
    with torch.no_grad():
        for layer in model.layers:
            layer.output_weight.zero_()
            layer.mlp.down_weight.zero_()
    return model


def _llama(size: TinySize, shape: TinyShape) -> ModelConfig:
    return ModelConfig(
        architecture=LLAMA,
        vocab_size=size.vocab_size,
        **asdict(shape),
        max_position_embeddings=size.max_positions,
        tied_embeddings=True,
        eos_token_ids=(END_OF_TEXT_ID,),
    )
