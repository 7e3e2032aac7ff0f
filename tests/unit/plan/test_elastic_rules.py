import pytest

from raymega.plan.elastic_rules import host_faults


@pytest.mark.parametrize("field", ["elastic.spares", "elastic.snapshot_every"])
def test_host_that_keeps_no_process_has_no_use_for_what_needs_them(field):
    values = {"spares": int(field == "elastic.spares"), "snapshot_every": int("snap" in field)}
    (fault,) = host_faults("ray_train", **values)
    assert fault.fact == f"cluster.host=ray_train with {field}=1"
    assert host_faults("ray", **values) == []
