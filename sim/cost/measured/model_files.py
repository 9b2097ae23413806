"""Where the configuration of a model stands: a path, the database of measured kernels, or the cache of Hugging Face.

Models that are built in have none (`core/model_shape/catalogue.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.model_shape import HF_QUANT_CONFIG, built_in_config, published_alike
from .database import packaged_config

CONFIG = "config.json"
_CACHED = "models--"  # what a model's folder in the cache begins with: models--ORGANISATION--NAME


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        config: Its `config.json`.
        quantization: Its `hf_quant_config.json`, which may not exist.
        name: What reports call it.
        differs: Keys that differ from the file, of a model that has another one's shape.
    """

    config: Path
    quantization: Path
    name: str
    differs: Mapping[str, Any] = field(default_factory=dict)


def is_config_file(name: str) -> bool:
    """Return whether a model's name is the path of a config.json or of its directory."""
    return name.endswith(".json") or os.path.isdir(name)


def find_model_files(name: str) -> ModelFiles | None:
    """Return the files of a model by its path or its name. None for a built-in model, and for an unknown one."""
    if is_config_file(name):
        return _of_path(Path(name))
    if built_in_config(name) is not None:
        return None
    own_name = name.rpartition("/")[2]
    for other, differs in ((name, {}), published_alike(name)):
        packaged = packaged_config(other)
        if packaged is not None:
            return ModelFiles(*packaged, own_name, differs)
    cached = _snapshot(_cache() / f"{_CACHED}{name.strip().replace('/', '--')}")
    return None if cached is None else ModelFiles(cached / CONFIG, cached / HF_QUANT_CONFIG, own_name)


def _of_path(path: Path) -> ModelFiles:
    """Return the files at a path, which may be a model's folder in the cache, whose files are links."""
    file = path
    if path.is_dir():
        file = (path if (path / CONFIG).is_file() else _snapshot(path) or path) / CONFIG
    cached = next((part for part in reversed(file.absolute().parts) if part.startswith(_CACHED)), None)
    name = file.resolve().parent.name if cached is None else cached.rpartition("--")[2]
    return ModelFiles(file, file.with_name(HF_QUANT_CONFIG), name)


def _cache() -> Path:
    """Return the folder of downloaded models, where the library huggingface_hub looks for it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of a model in the cache: that of the branch `main`, or else the newest; None without one."""
    found = [file.parent for file in folder.glob(f"snapshots/*/{CONFIG}")]
    try:
        main = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = folder
    return main if main in found else max(found, key=lambda one: one.stat().st_mtime_ns, default=None)
