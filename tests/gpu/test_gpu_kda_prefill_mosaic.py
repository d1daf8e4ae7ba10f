"""The same cases as on a CPU, compiled."""

from test_pallas_kda_prefill_mosaic import *  # noqa: F403
