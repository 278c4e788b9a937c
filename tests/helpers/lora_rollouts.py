"""An actor with adapters and an engine that generates for it, with the bytes that each stream of weights has had."""

from collections import Counter
from types import SimpleNamespace

import torch

from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS, SAMPLED
from rollout.prompts import PromptBuilder
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker, lora_streams

CPU = torch.device("cpu")


def lora_actor(model_type, path, **options):
    """An actor whose adapters are not zero, prompts for it, and a function that changes the adapters."""
    checkpoint = write_checkpoint(model_type, path)
    config = ActorConfig(checkpoint, temperature=SAMPLED.temperature, lora_rank=3, lora_alpha=8.0, **options)
    return of_actor(ActorWorker(config, CPU))


def of_actor(actor, changed=True):
    generator = torch.Generator().manual_seed(0)

    def change():
        with torch.no_grad():
            for parameter in actor.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    if changed:
        change()
    builder = PromptBuilder.from_pretrained(actor.config.model_path, 300)
    with_images = builder.family.vision_parts
    rows = [
        row if with_images else {"prompt": row["prompt"].replace("<image>", "words "), "images": []} for row in ROWS
    ]
    prompts = builder([row | {"uid": f"prompt {number}"} for number, row in enumerate(rows)])
    return SimpleNamespace(actor=actor, change=change, builder=builder, prompts=prompts)


def rollout_for(setup, engine="hf", ranks=None, **options):
    """A rollout worker for the actor; ``sent`` counts the bytes of each stream."""
    actor, sent = setup.actor, Counter()

    def counted(name):
        def stream(dtype):
            for key, tensor in getattr(actor, name)(dtype):
                sent[name] += tensor.nbytes
                yield key, tensor

        return stream

    lora = lora_streams(actor.config, counted("base_weights"), counted("adapter_weights"))
    config = RolloutConfig(actor.config.model_path, engine, options)
    worker = RolloutWorker(config, counted("named_weights"), ranks or Ranks(), lora=lora)
    worker.sent = sent
    return worker


def take(counter):
    """What has been counted since the last time."""
    found = dict(counter)
    counter.clear()
    return found


def largest_difference(setup, data):
    """Of the engine's log-probs and the actor's."""
    mask = data["response_mask"].bool()
    return float((setup.actor.log_probs(data)["old_log_probs"] - data["rollout_log_probs"])[mask].abs().max())


def bytes_of(stream):
    return sum(tensor.nbytes for _, tensor in stream)
