"""The row that holds a sample's prompt and what is drawn after it."""

import pytest
import torch

from raymega.data.format import TOKENIZER_FILE
from raymega.events import SamplesDrawn
from raymega.plan.batch import row_length
from raymega.prepare.tokenizer.trained import byte_tokenizer
from raymega.train.build import build_parts
from raymega.train.run_samples import RunSampler
from tests.support.channels import KeptReports
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE
from tests.unit.data.datasets import write_dataset

LONG = "model.max_positions=256"


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "length"),
    [
        (20, 256, 32),
        (32, 256, 32),
        (33, 256, 64),
        (300, 256, 256),
        # a row that the unit does not divide is as long as the run's
        (20, 100, 100),
    ],
)
def test_row_is_the_shortest_that_holds_the_tokens_in_whole_units(num_tokens, seq_len, length):
    assert row_length(num_tokens, make_test_plan(f"data.seq_len={seq_len}", LONG).job) == length


def test_a_sample_without_finite_logits_says_so(tmp_path):
    """The run proceeds."""
    write_dataset(tmp_path, train=(50,) * 5, valid=(40,) * 5)
    (tmp_path / TOKENIZER_FILE).write_text(byte_tokenizer())
    plan = make_test_plan(
        *layout_overrides("tp1"), "model.vocab_size=257", f"data.path={tmp_path}", "run.samples_every=1",
        "run.sample_prompts=['ab', 'c']", "run.sample_tokens=4", "model.moe={}",
    )  # fmt: skip
    parts, channel = (
        build_parts(plan, rank=0, groups=ALONE, device=torch.device("cpu")),
        KeptReports(),
    )
    for param in parts.modules[-1].parameters():
        param.data.fill_(torch.nan)
    RunSampler(parts, channel, 0).report_when_due(1)
    (drawn,) = [each for each in channel.reports if isinstance(each, SamplesDrawn)]
    assert drawn.texts == (" (the next logits are NaN or Inf)",) * 2


def test_unit_grows_with_the_axes_that_cut_a_row():
    plan = make_test_plan(
        "data.seq_len=256", LONG, "parallel.tp=2", "parallel.pp=1", "parallel.cp=2"
    )
    assert row_length(20, plan.job) == 128
