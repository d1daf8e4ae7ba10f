"""The same cases as on a CPU, compiled."""

from test_pallas_conv import *  # noqa: F403
