"""The same cases as on a CPU, compiled, and many tokens."""

from test_pallas_attnres_mosaic import *  # noqa: F403
