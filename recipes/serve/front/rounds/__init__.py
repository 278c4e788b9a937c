"""Rounds of the server: the requests of all runs in the order of each, what the journal has of them, and what each comes to."""

from recipes.serve.front.rounds.barriers import Barriers
from recipes.serve.front.rounds.round_journal import RoundJournal
from recipes.serve.front.rounds.scheduler import Scheduler

__all__ = ["Barriers", "RoundJournal", "Scheduler"]
