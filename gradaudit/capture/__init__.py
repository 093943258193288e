"""What happens inside the training process: hooks, statistics on the device, one thread that writes."""
