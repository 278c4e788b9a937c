"""The policy inside vLLM: the worker that samples with it, and what drafts tokens for it. vLLM imports both by their names."""
