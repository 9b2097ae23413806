"""No checkpoint loads under another family's name and then computes something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import load_target
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.families import ARCHITECTURES, MODEL_TYPES, MULTIMODAL
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.dense import DenseAttention
from small_checkpoint import write_target

TOKENS = torch.arange(60) * 7 % 320
# Names of other families in `transformers`, some of which differ from a known one by a letter or a digit.
OTHERS = (
    "ApertusForCausalLM", "ArceeForCausalLM", "BaichuanForCausalLM", "BambaForCausalLM", "BitNetForCausalLM",
    "ChatGLMModel", "Cohere2ForCausalLM", "CohereForCausalLM", "DeepseekV32ForCausalLM", "DiffLlamaForCausalLM",
    "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "FalconForCausalLM", "Gemma3nForCausalLM", "GemmaForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmForCausalLM", "GPTNeoXForCausalLM", "GraniteMoeForCausalLM", "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM", "InternLM3ForCausalLM", "Lfm2ForCausalLM", "LlamaForCausalLm", "MiniCPMForCausalLM",
    "MinistralForCausalLM", "Mistral4ForCausalLM", "NemotronForCausalLM", "Olmo3SinkForCausalLM", "OlmoForCausalLM",
    "OlmoeForCausalLM", "Phi4MMForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3_5MoeForCausalLm", "QwenLMHeadModel", "StableLmForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
)  # fmt: skip


def test_other_families_are_refused_by_name():
    data = SHAPES["llama"].to_dict()
    del data["model_type"]
    for name in OTHERS:
        with pytest.raises(ConfigError, match=f"architectures: {name}"):
            ModelConfig.from_dict(data | {"architectures": [name]})


def test_a_model_type_of_another_family_is_refused():
    for label, shape in SHAPES.items():
        for model_type in {*MODEL_TYPES.values(), "unheard_of", "cohere2", "kimi_linear"} - {
            MODEL_TYPES[shape.architecture]
        }:
            data = shape.to_dict() | {"model_type": model_type}
            if model_type == "unheard_of":  # nothing is known of it: what the architecture says holds
                assert ModelConfig.from_dict(data) == shape, label
                continue
            with pytest.raises(ConfigError, match=f"contradicts the model_type '{model_type}'"):
                ModelConfig.from_dict(data)


def test_a_language_model_inside_another_model_is_the_one_that_its_model_type_says():
    for name, families in MULTIMODAL.items():
        for family in families:
            shape = SHAPES[family]
            text = {key: value for key, value in shape.to_dict().items() if key != "architectures"}
            assert ModelConfig.from_dict({"architectures": [name], "text_config": text}) == shape
        with pytest.raises(ConfigError, match=r"text_config.model_type: 'qwen3': inside \w+ the decoder runs"):
            ModelConfig.from_dict({"architectures": [name], "text_config": SHAPES["qwen3"].to_dict()})


@pytest.mark.fast("llama", "gemma3", "deepseek_v3", "qwen3_5", ci="*")
@pytest.mark.parametrize("label", SHAPES)
@torch.no_grad()
def test_a_checkpoint_under_any_other_name_is_refused_or_computes_the_same(label: str, tmp_path: Path):
    """Also without a `model_type`; a Mistral without windows, for example, is a Llama."""
    directory = write_target(tmp_path, SHAPES[label])
    data = json.loads((directory / "config.json").read_text())

    def logits() -> torch.Tensor:
        model = load_target(directory, TorchOps(), dtype=torch.float64)
        return model.logits(model(TOKENS, DenseAttention([60])).hidden)

    expected, accepted = logits(), []
    del data["model_type"]
    for architecture in ARCHITECTURES:
        (directory / "config.json").write_text(json.dumps(data | {"architectures": [architecture]}))
        try:
            found = logits()
        except ConfigError:
            continue
        accepted.append(architecture)
        torch.testing.assert_close(found, expected, msg=lambda text, name=architecture: f"as {name}: {text}")
    assert SHAPES[label].architecture in accepted
