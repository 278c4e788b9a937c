"""SFT, then GRPO, on questions about pictures, as users run it; see tests/data/test_easy_vqa_rows.py for the rows."""

import re
