import math

import numpy as np
import pytest

from raymega.data.format import ShardMeta
from raymega.errors import Fault
from raymega.prepare.documents import BadLine
from raymega.prepare.shards import GroupDone, SplitPart
from raymega.prepare.totals import Totals, cross_entropy


def _done(index, **counts):
    parts = {
        name: SplitPart(
            shard=ShardMeta(
                file=f"{name}/{index:06d}.arrow", num_documents=1, num_tokens=sum(c), num_bytes=9,
                crc32=0,
            ),
            num_text_bytes=sum(c),
            counts=np.array(c),
        )
        for name, c in counts.items()
    }  # fmt: skip
    return GroupDone(index=index, num_replaced=1, parts=parts)


def test_cross_entropy_adds_one_to_every_count_of_the_other_split():
    # Add one: the other split has 4, 1 and 2 of 7.
    expected = (2 * math.log(7 / 4) + 1 * math.log(7 / 1)) / 3
    value = cross_entropy(np.array([2, 1, 0]), under=np.array([3, 0, 1]))
    assert value == pytest.approx(expected, rel=1e-12)


def test_totals_do_not_depend_on_the_order_of_the_groups():
    reports = [_done(0, train=[3, 0, 1]), _done(1, train=[1, 1, 1], valid=[0, 2, 0])]
    totals = [Totals(3), Totals(3)]
    for report in reports:
        totals[0].add(report)
    for report in reversed(reports):
        totals[1].add(report)
    shards = [part.shard for report in reports for part in report.parts.values()]
    assert totals[0].splits(shards) == totals[1].splits(shards[::-1])
    assert totals[0].valid_entropy() == totals[1].valid_entropy() == pytest.approx(math.log(10 / 2))
    assert totals[0].splits(shards)["train"].num_tokens == 7 and totals[0].num_replaced == 2


def test_empty_splits_are_faults_unless_nothing_was_held_out():
    totals = Totals(3)
    assert [each.fact for each in totals.split_faults(0.1)] == ["all documents are empty"]
    totals.add(_done(0, train=[1, 1, 1]))
    assert totals.split_faults(0.0) == [] and totals.valid_entropy() == -1.0
    assert [fault.fact for fault in totals.split_faults(0.1)] == ["the valid split is empty"]
    assert list(totals.splits([])) == ["train"]


def test_faults_of_all_groups_are_kept_in_order():
    totals = Totals(3)
    for index in (1, 0):
        fault = Fault(fact=f"group {index}", rule="", remedy="")
        totals.add(GroupDone(index=index, faults=(fault,)))
    assert [fault.fact for fault in totals.faults()] == ["group 0", "group 1"]
    assert totals.num_groups == 2 and not totals.reports


def test_bad_lines_of_all_groups_count_together():
    totals = Totals(3, max_bad_lines=1)
    for index in (1, 0):
        totals.add(
            GroupDone(index=index, bad=(BadLine(name=f"a.jsonl@{index}", why="it is a list"),))
        )
    (fault,) = totals.faults()
    assert fault.fact.startswith("a.jsonl@0 has no document (it is a list), a.jsonl@1 has")
    assert "--max-bad-lines allows 1" in fault.rule and "--max-bad-lines 2" in fault.remedy
