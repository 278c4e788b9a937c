"""Data sets as rows, and loaders that build batches of prompts from them.

`recipes.data.conversation_rows`, which reads conversations, is also a command, so it is imported by its own name.
"""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.data.column_keys import ColumnKeys
    from recipes.data.drawn_rows import DrawnSums, DrawnTalks, ProblemRows
    from recipes.data.easy_vqa_rows import (
        Answered,
        Conversations,
        EasyVQA,
        EasyVQARows,
        fetch_easy_vqa,
        open_easy_vqa,
    )
    from recipes.data.labelled_pictures import (
        LabelledData,
        LabelledRows,
        Templates,
        drawn_data,
        folder_data,
        table_data,
    )
    from recipes.data.loader import EvaluationLoader, PromptLoader, drop_overlong
    from recipes.data.mixture import Mixture
    from recipes.data.problem_rows import INSTRUCTION, Geo3KDataset, load_rows, read_row
    from recipes.data.tables import StreamRows, TableRows, open_stream, open_tables

__all__ = [
    "INSTRUCTION",
    "Answered",
    "ColumnKeys",
    "Conversations",
    "DrawnSums",
    "DrawnTalks",
    "EasyVQA",
    "EasyVQARows",
    "EvaluationLoader",
    "Geo3KDataset",
    "LabelledData",
    "LabelledRows",
    "Mixture",
    "ProblemRows",
    "PromptLoader",
    "StreamRows",
    "TableRows",
    "Templates",
    "drawn_data",
    "drop_overlong",
    "fetch_easy_vqa",
    "folder_data",
    "load_rows",
    "open_easy_vqa",
    "open_stream",
    "open_tables",
    "read_row",
    "table_data",
]

__getattr__ = lazy_names(__name__, __file__)
