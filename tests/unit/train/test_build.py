"""What a rank is built from."""

import pytest
import torch

from raymega.data import open_split as opening
from raymega.parallel.comm.process_groups import build_groups
from raymega.train.build import build_parts
from tests.support.jobs import make_test_plan
from tests.unit.data.datasets import with_lengths, write_documents

SMALL = ("parallel.pp=1", "run.eval_samples=0", "model.vocab_size=257", "data.packing=best_fit")


@pytest.mark.parametrize("most", [1, 1000])
def test_ranks_leave_the_rows_of_a_large_packed_corpus_in_the_runs_store(
    tmp_path, monkeypatch, most
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(opening, "SHARED_DOCUMENTS", most)
    with_lengths(tmp_path / "made", write_documents(tmp_path / "made", num_shards=2, per_shard=50))
    plan = make_test_plan(
        *SMALL, f"data.path={tmp_path / 'made'}", f"checkpoint.uri={tmp_path / 'runs'}"
    )
    groups = build_groups(plan.grid, 0, timeout_s=1.0)
    build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
    left = [*(tmp_path / "runs" / plan.job.run.name / "packing").glob("*.npz")]
    assert len(left) == (most == 1)
