"""What a run shows: its console, files of metrics and rollouts, trackers, its report, and the viewer in the browser."""
