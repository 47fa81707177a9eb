"""Training of the small demo checkpoints with the models and ops that serve them."""
