"""From a task's problems to packed rows: rollouts, staleness, advantages, packing, evaluation."""
