"""What a run says about itself: metrics, stored rollouts, progress lines and an HTML report."""
