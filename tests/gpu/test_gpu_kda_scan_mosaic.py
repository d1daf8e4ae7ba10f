"""The same cases as on a CPU, compiled."""

from test_pallas_kda_scan_mosaic import *  # noqa: F403
