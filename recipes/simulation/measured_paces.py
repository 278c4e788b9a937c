"""What of a device's speed the phases of a step reach, as measured on H200 (benchmarks/RESULTS.md, docs/cluster_plan.md).

Each constant belongs to one measurement, or to the mean of several; nothing here was fitted to a step as a whole. Speeds of
layers, the tower, the optimizer, decoding, tp and sp are those of `recipes.forecast`.
"""

EXPERT_LAYER = 36e-3
"""Seconds that ep adds to forward and backward pass of a mixture's layer, in each micro-batch: 16 layers of 30B-A3B with ep 4.
Most of it was the host, which waited for the device in every layer. It no longer does, which has not been timed.
"""
WEIGHT = 50e-6  # seconds to hand over one tensor of weights, however small
HAND_OVER_LINK = 160e9  # bytes per second of weights that devices of a node gather for their engines
WAKING = 0.28  # seconds of waking the engines and of their sleep
