"""The options of the commands: one file for each, and those that several share. Reading them imports no torch.

A recipe's options are a frozen dataclass whose comments are the texts of ``--help``; `parse` makes one of a command line.
"""
