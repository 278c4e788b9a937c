"""Training of a model: passes, updates and checkpoints, in one object that the roles hold."""
