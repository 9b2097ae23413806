"""Parts of draft heads, computed from their tensors, and the small model that they draft for."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.models.eagle import DraftHead
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.tiny.dense import rotate
from torch import Tensor

MODEL = ModelConfig(LLAMA, 50, 32, 40, 5, 4, 2, 8, max_position_embeddings=64)
LAYER = replace(MODEL, num_layers=1)
TOKENS = torch.tensor([3, 14, 15, 9, 26, 5, 35])


def filled(head: DraftHead, seed: int = 2) -> DraftHead:
    """Fill the head with random weights. Returns it."""
    initialize(head, seed=seed, std=0.3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return head


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.rms_norm_eps) * weight


def attention_of(x: Tensor, tensors: dict[str, Tensor], prefix: str, cos_sin: Tensor) -> Tensor:
    q, k, v = (x @ tensors[f"{prefix}self_attn.{p}_proj.weight"].T for p in "qkv")
    rows = cos_sin[: len(x)].double()
    q, k = rotate(q.view(-1, 4, 8), rows), rotate(k.view(-1, 2, 8), rows)
    heads = []
    for h in range(4):
        scores = q[:, h] @ k[:, h // 2].T / 8**0.5
        weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).softmax(-1)
        heads.append(weights @ v.view(-1, 2, 8)[:, h // 2])
    return torch.cat(heads, -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def mlp_of(x: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    normed = norm(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (normed @ tensors[f"{prefix}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return (F.silu(gate) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T
