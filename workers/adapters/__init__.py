"""Training of many adapters of one frozen model, whose rows are computed in one packed pass."""
