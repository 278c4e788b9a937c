"""Batches as bytes: `leaves` encodes tensors, arrays and images for `wire` (pickle), `file` and the collectives."""

__all__: list[str] = []  # Users find `shared_blobs` and the verbs that read and write in `dataproto`.
