"""Tensor files of a checkpoint directory, single or sharded: names and shapes first, the tensors one by one.

Safetensors are read where there are any, else `pytorch_model.bin`, the form of many published draft heads. That file is
a pickle, of which torch's loader for weights (`weights_only`) builds tensors and nothing else; a file that asks for
more is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....core.errors import ConfigError, Problem
from ....core.parsing import read_json_object
from ....observe.input_files import read_text
from ...types.shards import ShardCut

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_SHARD_BYTES = 5 * 10**9
MAPPED_BYTES = 1 << 24  # of a file that is read
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
PREDICTION = ("mtp_layers.", "mtp.")  # beside a model's own layers
TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.")  # of models that see
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


class CheckpointError(ConfigError):
    """A checkpoint's files do not match its configuration; the message has all problems."""


class NotTensors(Exception):
    """A pickle is damaged, or asks for more than tensors."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk, unread."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16", "F32", "I64", "BOOL", …


def list_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint by name; only headers are read.

    Raises CheckpointError for missing, truncated or unreadable files, and for an index that promises what its shards do
    not have.
    """
    directory = Path(directory)
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (directory / index).is_file():
            return _list_shards(directory, directory / index)
        if (directory / single).is_file():
            try:
                return _list_file(directory / single)
            except (SafetensorError, NotTensors) as error:
                raise CheckpointError(str(directory / single), [_unreadable(error)]) from error
    raise CheckpointError(str(directory), [Problem("", _why_nothing(directory))])


def read_tensors(
    stored: Mapping[str, StoredTensor], cuts: Mapping[str, ShardCut] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the CPU), file by file, each read when it is asked for. Raises CheckpointError.

    Of a tensor that `cuts` names, its part; nothing else of it is read from safetensors."""
    for path in sorted({tensor.path for tensor in stored.values()}):
        names = [name for name, tensor in stored.items() if tensor.path == path]
        try:
            if path.suffix == ".bin":
                tensors = _load_pickled(path)
                yield from ((n, cuts[n].of(tensors[n]) if n in cuts else tensors[n]) for n in names)
                continue
            left = iter(names)
            while (first := next(left, None)) is not None:
                yield from _read_part(path, chain((first,), left), cuts)
        except (SafetensorError, OSError, NotTensors) as error:
            raise CheckpointError(str(path), [_unreadable(error)]) from error


def _read_part(path: Path, names: Iterator[str], cuts: Mapping[str, ShardCut]) -> Iterator[tuple[str, Tensor]]:
    """Yield what `read_tensors` does of the first of `names`, up to `MAPPED_BYTES`: what was read of a file counts as
    the memory of the process until the file is closed."""
    left = MAPPED_BYTES
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in names:
            tensor = cuts[name].of(file.get_slice(name)) if name in cuts else file.get_tensor(name)
            left -= tensor.nbytes
            yield name, tensor
            del tensor
            if left <= 0:
                return


def has_own_head(directory: str | Path) -> bool:
    """Return whether the files have an LM head that is another matrix than the embeddings. No files have none: loading
    them says what is wrong."""
    try:
        stored = {language_model_name(name): (name, tensor) for name, tensor in list_tensors(directory).items()}
    except CheckpointError:
        return False
    heads = [name for name in stored if name is not None and name.startswith("lm_head.")]
    if heads != [HEAD] or EMBEDDINGS not in stored:
        return bool(heads)  # a quantized head is not compared
    pair = dict(read_tensors(dict((stored[HEAD], stored[EMBEDDINGS]))))
    head, embeddings = (pair[stored[name][0]] for name in (HEAD, EMBEDDINGS))
    return not torch.equal(head, embeddings.to(head.dtype))


def language_model_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of the language model alone;
    None for towers that see and for prediction layers."""
    if name.removeprefix("model.").startswith(TOWERS + PREDICTION):
        return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Callable[[], Tensor], int]]) -> None:
    """Write every tensor, (name, how to get it, bytes), into one file, or into shards with an index where one would be
    too large.

    No more than one shard is in memory at a time.
    """
    shards: list[list[tuple[str, Callable[[], Tensor]]]] = [[]]
    total = room = 0
    for name, get, size in tensors:
        if shards[-1] and room + size > MAX_SHARD_BYTES:
            shards.append([])
            room = 0
        shards[-1].append((name, get))
        room += size
        total += size
    if len(shards) == 1:
        _write(directory / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file_name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write(directory / file_name, shard)
        weight_map |= {name: file_name for name, _ in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, shard: list[tuple[str, Callable[[], Tensor]]]) -> None:
    save_file({name: get().contiguous() for name, get in shard}, path, metadata={"format": "pt"})


def _load_pickled(path: Path) -> dict[str, Tensor]:
    """Read a pickle of tensors by name, and nothing else: their memory is mapped. Raises NotTensors."""
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before torch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the loader's own, and whatever a damaged file makes it stumble over
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise NotTensors(f"it asks for {wanted[1]}" if wanted else "it is damaged") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise NotTensors("it holds something else than tensors by name")
    return {str(name): tensor for name, tensor in loaded.items()}


def _list_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == ".bin":
        return {
            name: StoredTensor(path, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in sorted(_load_pickled(path).items())
        }
    found = {}
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            found[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
    return found


def _list_shards(directory: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = read_json_object(str(index), read_text, of_checkpoint=True)["weight_map"]
        names = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (KeyError, AttributeError) as error:
        raise CheckpointError(str(index), [Problem("weight_map", "must map tensor names to files")]) from error
    problems: list[Problem] = []
    found: dict[str, StoredTensor] = {}
    for file_name, num_tensors in sorted(Counter(names.values()).items()):
        path = directory / file_name
        if path.parent != directory:
            problems.append(Problem(file_name, "is not a file name: shards stand beside their index"))
        elif not path.is_file():
            problems.append(Problem(file_name, f"this shard is missing ({num_tensors} tensors)"))
        else:
            try:
                found |= {name: t for name, t in _list_file(path).items() if names.get(name) == file_name}
            except (SafetensorError, NotTensors) as error:
                problems.append(Problem(file_name, _unreadable(error).message))
    if not problems:
        problems = [Problem(name, f"is not in {file_name}") for name, file_name in names.items() if name not in found]
    if problems:
        raise CheckpointError(str(index), problems)
    return found


def _unreadable(error: Exception) -> Problem:
    if isinstance(error, NotTensors):
        return Problem("", f"is no file of tensors alone, and nothing else is unpickled: {error}")
    return Problem("", f"is truncated or no safetensors file ({error})")


def _why_nothing(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"has {pickles[0]} but neither {SINGLE} nor {PICKLED}: other pickle files can run code when they are read, so they are "
            "never read; convert them to safetensors"
        )
    return f"has neither {SINGLE} nor {INDEX} nor {PICKLED}"
