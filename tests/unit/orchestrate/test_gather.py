from raymega.orchestrate.gather import Gather


def test_add_hands_over_when_the_last_rank_has_come():
    gather = Gather(2)
    assert gather.add(rank=1, step=5, value="b") == {}
    assert gather.add(rank=1, step=6, value="d") == {}
    assert gather.add(rank=0, step=5, value="a") == {0: "a", 1: "b"}
    assert gather.add(rank=0, step=6, value="c") == {0: "c", 1: "d"}
    assert gather.add(rank=0, step=5, value="e") == {}
