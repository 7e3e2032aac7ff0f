"""Rules that give tensors other names."""

import pytest

from raymega.plan.rename_rules import make_renames, rename_faults, renamed


@pytest.mark.parametrize(
    ("rules", "name", "wanted"),
    [
        (["norm=final_norm"], "norm.weight", "final_norm.weight"),
        (["norm=final_norm"], "norms.weight", "norms.weight"),
        (["norm=final_norm"], "layers.0.norm.weight", "layers.0.norm.weight"),
        (["layers.*.wq=layers.*.attention.q"], "layers.12.wq.bias", "layers.12.attention.q.bias"),
        (["a.*.b.*=*.x.*.y"], "a.1.b.2.c", "1.x.2.y.c"),
        (["a.b=c", "a=d"], "a.b.w", "c.w"),
        (["a=d", "a.b=c"], "a.b.w", "d.b.w"),
        (["a.b.c=d"], "a.b", "a.b"),
        ([], "a.b", "a.b"),
    ],
)
def test_first_rule_that_fits_holds(rules, name, wanted):
    assert renamed(name, make_renames(rules)) == wanted


def test_inverse_takes_it_back():
    (rule,) = make_renames(["a.*.wq=layers.*.q"])
    assert rule.inverse().apply(rule.apply("a.3.wq.weight")) == "a.3.wq.weight"


@pytest.mark.parametrize("rule", ["a", "a=", "=b", "a..b=c", "a=b=c", "a.*=b", "a=b.*", "a =b", ""])
def test_text_that_is_no_rule_is_refused(rule):
    (fault,) = rename_faults("checkpoint.init_rename", [rule, "a.*.b=c.*"])
    assert repr(rule) in fault.fact and "OLD=NEW" in fault.rule
