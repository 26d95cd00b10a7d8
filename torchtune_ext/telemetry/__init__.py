"""These modules tell what a run does: metrics, stored rollouts, progress lines and an HTML report."""
