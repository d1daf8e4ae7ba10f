"""Flax NNX modules: parameters and wiring. Attribute paths are the released tensor names; weights are stored [out, in]."""
