"""The role workers: actor, reference, critic, rollout, reward."""
