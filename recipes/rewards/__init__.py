"""Rewards: functions from responses to scores."""
