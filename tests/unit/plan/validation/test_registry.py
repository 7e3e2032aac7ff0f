"""Every rule takes effect: one that the registry does not list would refuse nothing."""

import pkgutil
from importlib import import_module

from raymega.plan import validation
from raymega.plan.validation.registry import RULES
from raymega.plan.validation.rule import Rule


def test_each_rule_of_the_folder_is_listed_once():
    modules = [
        import_module(f"{validation.__name__}.{each.name}")
        for each in pkgutil.iter_modules(validation.__path__)
    ]
    made = {value for module in modules for value in vars(module).values() if _is_rule(value)}
    assert made <= set(RULES) and len(set(RULES)) == len(RULES)


def _is_rule(value):
    return isinstance(value, Rule)
