"""What the server keeps on disk: records and the journal in SQLite, checkpoints and snapshots in directories."""
