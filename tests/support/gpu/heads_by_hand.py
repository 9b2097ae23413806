"""Parts of draft heads, computed from their tensors, and the small model that they draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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


# -- block drafters, from their published tensors and config.json alone -----------------------------------------------


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, first: int, theta: float) -> Tensor:
    """Vectors [n, heads, d] at the positions from `first` on: channel i turns with channel i + d/2."""
    half = x.shape[2] // 2
    angles = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = ((first + torch.arange(len(x))).unsqueeze(1) * angles).unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class BlockByHand:
    """`tensors` by their published names, `config` as in config.json; embeddings and LM head [V, H] are the
    target's."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embeddings: Tensor, lm_head: Tensor) -> None:
        self.t, self.c, self.inner = tensors, config, config["dflash_config"]
        self.embeddings, self.lm_head = embeddings, lm_head
        self.eps = config["rms_norm_eps"]
        self.kind = config["architectures"][0]

    def drafts(self, text: Sequence[int], states: Tensor, steps: int) -> list[int]:
        """The tokens behind `text`; `states` [len − 1, k · H] are the target's behind its tokens, the last one's
        missing."""
        context = scaled(states @ self.t["fc.weight"].T, self.t["hidden_norm.weight"], self.eps)
        anchored = self.inner["sample_from_anchor"]
        tokens = [text[-1]] + [self.inner["mask_token_id"]] * (steps - anchored)
        x = self.embeddings[torch.tensor(tokens)] * self.inner["input_embedding_scale"]
        for i in range(self.c["num_hidden_layers"]):
            x = x + self._around(i, "attention_conv", "input_layernorm", x, lambda y, i=i: self._attend(i, y, context))
            x = x + self._around(i, "mlp_conv", "post_attention_layernorm", x, lambda y, i=i: self._mlp(i, y))
        hidden = scaled(x, self.t["norm.weight"], self.eps)[-steps:]
        logits = hidden @ self.lm_head.T * self.inner["output_multiplier"]
        if cap := self.inner["final_logit_softcapping"]:
            logits = cap * torch.tanh(logits / cap)
        return self._walk(hidden, logits, text[-1])

    def _around(self, i, conv, norm, x, sublayer):
        y = scaled(x, self.t[f"layers.{i}.{norm}.weight"], self.eps)
        if self.kind != "DFlash2DraftModel":
            return sublayer(y)
        base = self.t[f"layers.{i}.{conv}.base_kernel"]
        taps, group = self.inner["conv_kernel_size"], self.inner["conv_group_size"]
        kernels = (y @ self.t[f"layers.{i}.{conv}.kernel_projection.weight"].T).view(len(y), 2, taps, -1)
        return self._convolved(
            sublayer(self._convolved(y, kernels[:, 0], base[0], group)), kernels[:, 1], base[1], group
        )

    @staticmethod
    def _convolved(x: Tensor, delta: Tensor, base: Tensor, group: int) -> Tensor:
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(len(base)):
                if place >= tap:
                    of_channel = delta[place, tap].repeat_interleave(group)
                    out[place] += (base[tap] + of_channel) * x[place - tap]
        return out

    def _attend(self, i: int, x: Tensor, context: Tensor) -> Tensor:
        heads, kv_heads, d = (self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        weight = {
            name: self.t[f"layers.{i}.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        q_norm, k_norm = (self.t[f"layers.{i}.self_attn.{name}_norm.weight"] for name in "qk")
        theta, n, length = self.c["rope_theta"], len(x), len(context)
        both = torch.cat((context, x))
        keys, values = ((both @ weight[name].T).view(-1, kv_heads, d) for name in ("k_proj", "v_proj"))
        queries = (x @ weight["q_proj"].T).view(n, heads, d)
        queries = turned(scaled(queries, q_norm, self.eps), length, theta)
        keys = turned(scaled(keys, k_norm, self.eps), 0, theta)
        is_windowed = "layer_types" in self.c and self.c["layer_types"][i] == "sliding_attention"
        is_causal = self.inner.get("causal", is_windowed and not self.inner["sliding_window_non_causal"])
        out = torch.zeros(n, heads, d, dtype=x.dtype)
        for place in range(n):
            seen = [j for j in range(length + n) if j < length or not is_causal or j <= length + place]
            if is_windowed:
                first = length + (place if is_causal else 0) - self.c["sliding_window"] + 1
                seen = [j for j in seen if j >= first]
            for head in range(heads):
                of = head // (heads // kv_heads)
                weights = (keys[seen, of] @ queries[place, head] / d**0.5).softmax(0)
                out[place, head] = weights @ values[seen, of]
        return out.view(n, -1) @ weight["o_proj"].T

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        gate, up, down = (self.t[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def _walk(self, hidden: Tensor, logits: Tensor, token: int) -> list[int]:
        found, state = [], torch.zeros(self.c.get("markov_rank", 0), dtype=hidden.dtype)
        for h, scores in zip(hidden, logits, strict=True):
            if self.kind == "DFlash2DraftModel":
                a, b = (self.t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
                projected = self.t["candidate_selector.hidden_projection.weight"] @ h
                best = scores.argsort(descending=True)[: self.inner["selector_top_k"]].tolist()
                token = max(best, key=lambda c: float((a[token] * projected) @ b[c] + scores[c]))
            elif self.c.get("markov_rank"):
                bias, state = self._bias(h, token, state)
                token = int((scores + bias).argmax())
            else:
                token = int(scores.argmax())
            found.append(token)
        return found

    def _bias(self, h: Tensor, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        before, output = self.t["markov_head.markov_w1.weight"][token], self.t["markov_head.markov_w2.weight"]
        kind, rank = self.c["markov_head_type"], self.c["markov_rank"]
        if kind == "gated":
            gate = (
                self.t["markov_head.gate_proj.weight"] @ torch.cat((h, before)) + self.t["markov_head.gate_proj.bias"]
            )
            return output @ (gate.sigmoid() * before), state
        if kind == "rnn":
            joint = self.t["markov_head.joint_proj.weight"] @ torch.cat((state, before, h))
            joint = joint + self.t["markov_head.joint_proj.bias"]
            gate = joint[:rank].sigmoid()
            return output @ joint[2 * rank :].tanh(), gate * state + (1 - gate) * joint[rank : 2 * rank].tanh()
        return output @ before, state
