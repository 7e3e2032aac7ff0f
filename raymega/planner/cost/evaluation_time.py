"""Predict the seconds of evaluations and samples: forward-only pipelines over rows of tokens, before anything runs."""

from __future__ import annotations

from raymega.plan.batch import SCORED_MICRO_BATCHES_PER_STAGE, row_length
from raymega.plan.grid import Coords
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan, with_options
from raymega.planner.cost.step_time import message_time, stage_times


def evaluation_s(plan: RunPlan, num_rows: int, device: Accelerator) -> float:
    """Return the predicted seconds in which ``plan``'s ranks score ``num_rows`` rows of data.seq_len tokens.

    The pipeline runs at the pace of its busiest rank. It fills and drains between two exchanges of scores.
    """
    # forward seconds of a micro-batch on each rank of the pipeline
    grid, times = plan.grid, stage_times(plan, device)
    firsts = [grid.rank(Coords(tp=0, cp=0, dp=0, pp=pp)) for pp in range(grid.pp)]
    ranks_s = [sum(times[stage.index].forward_s for stage in plan.stages_of(r)) for r in firsts]
    busiest_s, whole_s = max(ranks_s), sum(ranks_s)
    message_s = message_time(plan, device) / 2 if grid.pp > 1 else 0.0
    # rows of one exchange, and micro-batches of a rank over all of them
    at_once = plan.batch.micro_batch_size * grid.dp * SCORED_MICRO_BATCHES_PER_STAGE * grid.pp
    num_exchanges = -(-num_rows // at_once)
    num_micro_batches = -(-num_rows // (plan.batch.micro_batch_size * grid.dp))
    fill_s = whole_s - busiest_s + (len(plan.stages) - 1) * message_s
    alone_s = num_micro_batches * (busiest_s + message_s) + num_exchanges * fill_s
    if not device.shared_cores:
        return device.straggler * alone_s
    # CPU workers share the cores of their node
    workers = min(grid.world_size, device.devices_per_node)
    mean_s = whole_s / grid.pp
    return max(alone_s, workers * num_micro_batches * mean_s / device.shared_cores)


def sample_s(plan: RunPlan, prompt_tokens: int, device: Accelerator) -> float:
    """Return the predicted seconds in which ``plan``'s ranks continue run.sample_prompts once.

    Each new token is the answer of a whole pass over rows that hold the longest prompt, of ``prompt_tokens``, and
    its answer. No text ends early here.
    """
    run = plan.job.run
    length = row_length(prompt_tokens + run.sample_tokens, plan.job)
    rows = with_options(plan, plan.job.with_values(data={"seq_len": length}))
    return run.sample_tokens * evaluation_s(rows, len(run.sample_prompts), device)
