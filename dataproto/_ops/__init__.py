"""What the verbs of `DataProto` do, as functions on columns."""
