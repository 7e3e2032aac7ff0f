"""Largest differences that tests accept, relative to max(1, largest reference value)."""

FLOAT64_LAYER = 1e-11  # a layer, block or stage in float64 against its one-rank reference
BFLOAT16_ROUNDING = 2.0**-8  # one rounding of a result to bfloat16 (8 bits of significand)
