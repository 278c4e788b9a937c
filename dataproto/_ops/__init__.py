"""The operations behind the verbs of `DataProto`, as functions on columns, values and memory."""
