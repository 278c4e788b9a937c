"""The front process without its routes: order, futures, samples, sessions, keys. It imports no torch."""
