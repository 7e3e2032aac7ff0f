"""docs/smollm2.md as a reader follows it: import, evaluate, continue, resume on another grid, export, generate."""

import json
import re
import shlex

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.running import page_folder, run
from tests.support.smollm2 import SETS, skip_without_it


@pytest.mark.real_model
@pytest.mark.wide
@pytest.mark.timeout(3600)
def test_page_leads_from_the_package_to_a_model_that_was_trained_further():
    skip_without_it()
    told = {}
    with page_folder() as folder:
        for block in blocks(ROOT / "docs" / "smollm2.md"):
            is_code = block.language == "python"
            commands = [f"python -c {shlex.quote(block.text)}"] if is_code else block.commands
            for command in commands:
                if command.startswith(("pip ", f"{SETS}=")) or "lambada_test" in command:
                    continue
                code, told[command] = run(command, folder)
                assert code == 0, f"{command}\n{told[command]}"
                print(f"$ {command}\n{told[command]}")
        exported = json.loads((folder / "smollm2" / "continued" / "config.json").read_text())
        files = {path.name for path in (folder / "smollm2" / "continued").iterdir()}
    assert (exported["model_type"], exported["num_key_value_heads"]) == ("llama", 3)
    assert files >= {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
    # Source text has become likelier, and the model still knows what it knew.
    before, after = (float(_found(told, "perplexity", name)) for name in ("native", "continue "))
    assert after < before
    assert "resum" in _found(told, "run.steps=11", "", whole=True)
    assert "The capital of France is Paris." in _found(told, "generate", "native", whole=True)
    assert "Paris" in _found(told, "AutoTokenizer", "", whole=True)


def _found(told, part, other, *, whole=False):
    """Return what the one command with both texts printed, or the perplexity of a token in it."""
    (text,) = (text for command, text in told.items() if part in command and other in command)
    return text if whole else re.search(r"token_perplexity +([\d.]+)", text)[1]
