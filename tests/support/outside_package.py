"""The package of docs/extending.md, written as files."""

from tests.docs.blocks import ROOT, blocks

USES = (
    "plugins.modules=[acme.plugins]", "plugins.callbacks=[acme.steps]", "plugins.metrics=[acme.bits]",
    "model.loss=acme.focal", "model.family=acme.tanh", "data.path=acme.squares:64",
    "data.transforms=[acme.skip]", "optimizer.name=acme.nesterov", "optimizer.lr_schedule=acme.triangle",
    "tracking.trackers=[console, acme.csv]",
)  # fmt: skip

STABLELM = {
    "model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "vocab_size": 259, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 64, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "use_qkv_bias": False, "partial_rotary_factor": 0.5, "initializer_range": 0.02,
}  # fmt: skip
"""config.json of a small StableLM, the family that the package has."""


def options(folder, gamma=1.5):
    """The setting of the options of the package's parts; the callback's files lie in ``folder``."""
    return f"plugins.options={{acme.focal: {{gamma: {gamma}}}, acme.steps: {{folder: {folder}}}}}"


def write_package(folder):
    for block in blocks(ROOT / "docs" / "extending.md"):
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    (folder / "acme" / "__init__.py").touch()
    return folder
