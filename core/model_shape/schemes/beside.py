"""What a model has beside the matrices that may be quantized, by the names that its checkpoints give it: norms,
routers, convolutions, biases. Lists of exceptions name these, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..matrices import Matrix

_OF_LAYER = """
    input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm pre_mlp_layernorm
    post_mlp_layernorm post_self_attn_layernorm pre_feedforward_layernorm_2 post_feedforward_layernorm_1
    post_feedforward_layernorm_2 post_per_layer_input_norm pre_ff_layernorm norm norm1 norm2 attn_norm ffn_norm
    per_layer_input_gate per_layer_projection layer_scalar eh_proj enorm hnorm shared_head shared_head.norm
    shared_head.head router router.proj router.scale router.per_expert_scale hc_attn_fn hc_ffn_fn hc_attn_base
    hc_ffn_base hc_attn_scale hc_ffn_scale
    mlp.gate mlp.router mlp.gate.e_score_correction_bias mlp.shared_expert_gate mlp.experts.gate_up_proj_bias
    mlp.experts.down_proj_bias block_sparse_moe.gate block_sparse_moe.router block_sparse_moe.e_score_correction_bias
    block_sparse_moe.gate.e_score_correction_bias feed_forward.router ffn.gate ffn.gate.tid2eid moe.gate moe.router_bias
    mixer.gate mixer.gate.e_score_correction_bias mixer.conv1d mixer.norm mixer.A_log mixer.D mixer.dt_bias
    mamba.conv1d mamba.norm mamba.A_log mamba.D mamba.dt_bias
    linear_attn.conv1d linear_attn.norm linear_attn.A_log linear_attn.dt_bias
    self_attn.q_norm self_attn.k_norm self_attn.v_norm self_attn.norm self_attn.o_norm self_attn.q_a_layernorm
    self_attn.kv_a_layernorm self_attn.sinks self_attn.attention_sink_bias self_attn.output_gate self_attn.rotary_emb
    self_attn.attn self_attn.k_scale self_attn.v_scale self_attn.indexer self_attn.indexer.k_norm
    self_attn.indexer.weights_proj self_attn.indexer.wk self_attn.indexer.wq_b self_attn.indexers_proj
    self_attn.index_q_norm self_attn.index_k_norm self_attn.A_log self_attn.dt_bias self_attn.b_proj self_attn.f_a_proj
    self_attn.f_b_proj self_attn.g_a_proj self_attn.g_b_proj self_attn.g_proj self_attn.q_conv1d self_attn.k_conv1d
    self_attn.v_conv1d attn.norm attn.q_norm attn.kv_norm attn.attn_sink attn.compressor.ape attn.compressor.norm
    attn.indexer.compressor.ape attn.indexer.compressor.norm
"""
OF_PARTS = "gate router e_score_correction_bias head embed embeddings"  # written without what they are a part of
_OUTSIDE = """
    embed_tokens lm_head norm norm_f final_layernorm rotary_emb score hc_head embed_tokens_per_layer
    per_layer_model_projection per_layer_projection_norm embedding_norm
"""


def beside(layers: Sequence[int]) -> Iterator[Matrix]:
    """Yield what models have beside their matrices, in these layers and outside."""
    yield from (Matrix((name,)) for name in (*_OUTSIDE.split(), *OF_PARTS.split()))
    yield from (Matrix((name,), layer) for layer in layers for name in _OF_LAYER.split())
