"""The packed model that training runs: attention, log-probs, precision, adapters and export of weights."""
