"""What a run shows of itself: metrics, stored rollouts, progress lines and an HTML report."""
