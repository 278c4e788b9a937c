"""Names of `dataproto.packing`, until all callers name that module."""

from dataproto.packing import MAX_TOKENS, PAD_TOKEN, equally_wide, other_response_columns, token_widths, widen  # noqa: F401
