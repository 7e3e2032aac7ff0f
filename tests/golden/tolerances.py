"""Largest differences from a golden of another Python, torch or machine; from one's own there is none."""

FOREIGN_FLOAT64 = 1e-12  # relative: a loss after a few steps in float64, a planner's figure
FOREIGN_ZERO = 1e-15  # absolute: what is nothing but for rounding
