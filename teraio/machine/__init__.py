"""The machine that a training run has: its device, its lower tiers, the links between them."""
