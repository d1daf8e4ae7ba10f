"""The same cases as on a CPU, compiled."""

from test_pallas_kda_decode import *  # noqa: F403
