"""Groups of a world of one rank; larger ones are in tests/dist."""

from dataclasses import fields

from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.comm.world import abort_world, close_world
from raymega.plan.grid import Grid


def test_a_world_of_one_needs_no_communicator():
    groups = build_groups(Grid(), 0, timeout_s=1.0)
    assert groups.nested == ()
    for field in (field for field in fields(groups) if field.name != "nested"):
        group = getattr(groups, field.name)
        assert (group.name, group.ranks, group.index, group.size) == (field.name, (0,), 0, 1)
        assert group.handle is None


def test_closing_and_aborting_without_a_world_do_nothing():
    close_world()
    abort_world()
