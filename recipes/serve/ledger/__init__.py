"""What the server keeps on disk: records and the journal in SQLite, checkpoints and snapshots in directories."""

from recipes.serve.ledger.database import Database, NotWritten
from recipes.serve.ledger.journal import Entry, Outcome
from recipes.serve.ledger.records import Checkpoint, Run, Sampler, Session

__all__ = ["Checkpoint", "Database", "Entry", "NotWritten", "Outcome", "Run", "Sampler", "Session"]
