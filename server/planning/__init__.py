"""What a base model and its adapters will take on GPUs, from its config.json alone."""
