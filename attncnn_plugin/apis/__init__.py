"""A model and its images from a config and a checkpoint: what the tools begin with."""
