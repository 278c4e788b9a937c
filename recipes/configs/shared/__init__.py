"""Options that several commands share, without torch."""
