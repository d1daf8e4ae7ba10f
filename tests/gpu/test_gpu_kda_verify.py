"""The same cases as on a CPU, compiled."""

from test_pallas_kda_verify import *  # noqa: F403
