"""Batches as bytes: `leaves` encodes tensors, arrays and images for `wire` (pickle), `file` and the collectives.

Users find `shared_blobs` and the verbs that read and write in `dataproto`.
"""
