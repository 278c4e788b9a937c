"""What the server keeps on disk: records and the journal in SQLite, checkpoints and snapshots in directories."""

from dataproto_server.ledger.database import Database, NotWritten
from dataproto_server.ledger.journal import Entry, Outcome
from dataproto_server.ledger.records import Checkpoint, Run, Sampler, Session

__all__ = ["Checkpoint", "Database", "Entry", "NotWritten", "Outcome", "Run", "Sampler", "Session"]
