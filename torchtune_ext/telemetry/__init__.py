"""Telemetry of a run: metrics, stored rollouts, progress lines and an HTML report."""
