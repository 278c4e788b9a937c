"""Actors of a test that runs on ranks, from a checkpoint in the folder that the ranks share, and their rows."""

import numpy as np
import torch

from dataproto import DataProto
from dataproto.packing import MAX_TOKENS
from helpers.layouts import CPU, joined, mixed_rows
from helpers.processes import shared_folder
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig


def actor_of(model_type: str, layout: Layout, options: dict) -> ActorWorker:
    """This rank's actor of the checkpoint ``model_type``."""
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.1)
    config = ActorConfig(str(shared_folder() / model_type), token_budget=60, optimizer=optimizer, **options)
    return ActorWorker(config, CPU, joined(layout))


def rows_of(actor: ActorWorker) -> DataProto:
    """This rank's share of mixed rows with advantages and uids."""
    data = mixed_rows(actor.module.model.config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    data["uid"] = np.array([f"row-{row}" for row in range(len(data))], dtype=object)
    data.meta_info[MAX_TOKENS] = 6
    return share_out(data, 2)[actor.model.ranks.rank("dp")] if actor.model.ranks.size("dp") > 1 else data
