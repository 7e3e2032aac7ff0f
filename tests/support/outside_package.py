"""The package of docs/extending.md, written as files."""

from tests.docs.blocks import ROOT, blocks

USES = (
    "plugins.modules=[acme.plugins]", "plugins.callbacks=[acme.steps]", "plugins.metrics=[acme.bits]",
    "model.loss=acme.focal", "model.family=acme.stablelm", "data.path=acme.squares:64",
    "data.transforms=[acme.skip]", "optimizer.name=acme.nesterov", "optimizer.lr_schedule=acme.triangle",
    "tracking.trackers=[console, acme.csv]",
)  # fmt: skip


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
