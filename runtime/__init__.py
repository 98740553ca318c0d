"""State: operators, flat shards, process groups, gradients, agreement between ranks. Knows nothing of graphs."""
