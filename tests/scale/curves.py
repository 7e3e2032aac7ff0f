"""Exponents of a cost over the number of ranks, and the CPU time of a call."""

import gc
import math
import time


def exponent(costs):
    """Slope of the costs over the sizes on logarithmic scales, between the smallest and the largest.

    ``costs`` are by size.
    """
    (small, first), *_, (large, last) = sorted(costs.items())
    return math.log(last / first) / math.log(large / small)


def cpu_s(make, *, best_of=3):
    """Least CPU time of ``make()()`` in seconds over some trials; only the inner call counts."""
    times = []
    for _ in range(best_of):
        run = make()
        gc.collect()
        begun_s = time.process_time()
        run()
        times.append(time.process_time() - begun_s)
    return min(times)
