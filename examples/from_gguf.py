"""Make a checkpoint folder of a GGUF file: `python examples/from_gguf.py MODEL.gguf FOLDER`.

transformers reads the file, unpacks its quantized weights and saves model, configuration and tokenizer. It needs the
packages `transformers`, `gguf` and `accelerate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    where, name = str(arguments.file.parent), arguments.file.name
    # Without `dequantize` the model keeps the file's numbers in a form that cannot be saved.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, quantization_config=unpacked)
    model.save_pretrained(arguments.folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(arguments.folder)
    print(f"{arguments.folder}: {model.num_parameters():,} parameters in {model.dtype}")


if __name__ == "__main__":
    main()
