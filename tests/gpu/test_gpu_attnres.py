"""The same cases as on a CPU, compiled."""

from test_pallas_attnres import *  # noqa: F403
