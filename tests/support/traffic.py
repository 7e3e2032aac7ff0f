"""Traffic that the planner expects."""

from raymega.config.schema import Job
from raymega.plan.grid import Grid
from raymega.plan.memory.elements import Elements
from raymega.planner.cost.optimizer_time import transfers


def exchanged_bytes(job: Job, held: Elements, grid: Grid) -> float:
    """Return the mean bytes that a rank sends to assemble Muon's matrices and to return them."""
    return sum(
        each.times * each.num_bytes * (each.size - 1) / each.size
        for each in transfers(job, held, grid)
    )
