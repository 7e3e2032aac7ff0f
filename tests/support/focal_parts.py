"""List of a plug-in for planted mistakes: a loss that uses every method of VocabLogits."""

from raymega.plugins import Plugin

PLUGINS = (Plugin(kind="loss", name="tests.focal", target="tests.support.focal_code:focal"),)
