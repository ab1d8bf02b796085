"""The trajectories of recursive language models, for programs that read those of other agents."""
