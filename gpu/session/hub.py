"""Checkpoints by their name on the Hugging Face hub: from the local cache, or downloaded into it."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from ...core.errors import ConfigError

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.jinja", "tokenizer*", "*.safetensors"]
_PICKLED = "pytorch_model*.bin"
_LEFT_OUT = ["*/*", "consolidated*"]  # the same weights in other layouts


def local_checkpoint(given: str | PathLike[str], key: str = "model") -> Path:
    """Return the directory of a checkpoint: `given` itself, or the entry of the hub's cache for the name
    `organisation/model`.

    What the cache lacks is downloaded, unless HF_HUB_OFFLINE is set. A path that is neither comes back as it is, to be
    refused as a directory. Raises ConfigError, with the command that fetches the checkpoint elsewhere.
    """
    path, name = Path(given), Path(given).as_posix()
    # In a folder that is there, a name that is not is a misspelt one.
    if path.exists() or path.parent.is_dir() or not REPOSITORY.fullmatch(name):
        return path
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        raise ConfigError.of("<arguments>", key, f"{name} is no directory; {_elsewhere(name)}") from None
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it has no weights that can be read"
    for is_local in (True, False):
        try:
            for patterns in (_FILES, [*_FILES, _PICKLED]):
                found = Path(
                    snapshot_download(
                        name, allow_patterns=patterns, ignore_patterns=_LEFT_OUT, local_files_only=is_local
                    )
                )
                if any(found.glob("*.safetensors")) or any(found.glob(_PICKLED)):
                    return found
        except Exception as error:  # of the network, of access, of an interrupted download: the library has many kinds
            if not constants.HF_HUB_OFFLINE:
                reason = str(error).strip().partition("\n")[0]
    where = f"no directory, nor whole in the hub's cache {constants.HF_HUB_CACHE}"
    message = f"{name} is {where}, and was not downloaded: {reason}; {_elsewhere(name)}"
    raise ConfigError.of("<arguments>", key, message)


def _elsewhere(name: str) -> str:
    folder = name.rpartition("/")[2]
    return f"where there is a network: `hf download {name} --local-dir {folder}`, then give that directory"
