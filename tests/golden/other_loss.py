"""A loss and a transform of a plug-in that only a job file's rules look at."""

from raymega.plugins import Plugin

PLUGINS = (
    Plugin(kind="loss", name="golden.margin", target="tests.golden.other_loss:margin"),
    Plugin(kind="transform", name="golden.same", target="tests.golden.other_loss:same"),
)
