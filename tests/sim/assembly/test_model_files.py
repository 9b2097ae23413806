"""Where models are found: in the layout of Hugging Face's cache, and by the names of repositories of one shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import BUILT_IN
from foredraft.sim.assembly.models import model_shape
from foredraft.sim.cost.measured.model_files import find_model_files
from foredraft.sim.scenario_file import check_names, load_scenario

OWNER, NAME = "some-lab", "Own-8B"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder in a cache, as huggingface_hub makes it: its files are links to blobs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = tmp_path / "hub" / f"models--{OWNER}--{NAME}"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    for revision, layers in (("aaa", 32), ("bbb", 16)):
        blob = folder / "blobs" / f"blob-{revision}"
        blob.write_text(json.dumps({**BUILT_IN["llama-3.1-8b"], "num_hidden_layers": layers}))
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").symlink_to(f"../../blobs/blob-{revision}")
    (folder / "refs" / "main").write_text("aaa")
    return folder


def test_a_model_in_the_cache_is_found_by_its_name_and_by_each_path(cached: Path):
    snapshot = cached / "snapshots" / "aaa"
    for given in (f"{OWNER}/{NAME}", str(cached), str(snapshot), str(snapshot / "config.json")):
        shape = model_shape(given, "model.target")
        assert (shape.name, shape.layers) == (NAME, 32), given
        check_names(load_scenario(None, [f"model.target={given}"])[0])
    assert model_shape(str(cached / "snapshots" / "bbb"), "model.target").layers == 16


def test_the_file_beside_it_says_its_format(cached: Path):
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (cached / "snapshots" / "aaa" / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert model_shape(f"{OWNER}/{NAME}", "model.target").weight_dtype == "fp8"


def test_without_a_branch_the_newest_snapshot_counts(cached: Path):
    (cached / "refs" / "main").unlink()
    files = find_model_files(f"{OWNER}/{NAME}")
    assert files is not None and files.config.parent.name == "bbb"


def test_a_name_in_no_cache_is_unknown(cached: Path):
    assert find_model_files(f"{OWNER}/{NAME}-Instruct") is None
    with pytest.raises(ConfigError, match=r"unknown model.*hf download some-lab/Own-8B-Instruct config.json"):
        check_names(load_scenario(None, [f"model.target={OWNER}/{NAME}-Instruct"])[0])


@pytest.mark.parametrize(
    ("name", "context", "weights"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 131_072, "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", 131_072, "nvfp4"),
        ("zai-org/GLM-4.6-FP8", 202_752, "fp8"),
        ("qwen3-next-80b-a3b-instruct", 262_144, "bf16"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8192, "bf16"),
    ],
)
def test_other_names_of_built_in_models(name: str, context: int, weights: str):
    shape = model_shape(name, "model.target")
    assert (shape.max_context, shape.weight_dtype) == (context, weights)


def test_repositories_of_the_shape_of_one_in_the_database():
    pytest.importorskip("aiconfigurator_core")
    assert (
        model_shape("deepseek-ai/DeepSeek-R1-0528", "").parameters
        == model_shape("deepseek-ai/DeepSeek-R1", "").parameters
    )
    long = model_shape("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "")
    assert (long.max_context, long.weight_dtype, long.name) == (262_144, "fp8", "Qwen3-235B-A22B-Instruct-2507-FP8")
