from .checking import AnswerChecker as AnswerChecker
from .geometry3k import (
    compute_score as compute_score,
    format_score as format_score,
    geo3k_reward as geo3k_reward,
)
from .reward_functions import (
    RewardFunction as RewardFunction,
    RewardRow as RewardRow,
    WeightedRewards as WeightedRewards,
    as_reward_function as as_reward_function,
    from_easyr1 as from_easyr1,
    from_trl as from_trl,
    from_verl as from_verl,
    load_reward as load_reward,
    remote_reward as remote_reward,
)
from .sequence_classifier import SequenceClassifier as SequenceClassifier
from .short_answers import normalised as normalised, short_answer_reward as short_answer_reward
