"""The packed model that training runs."""
