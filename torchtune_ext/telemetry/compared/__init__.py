"""What a page of several runs holds: which runs, which of their settings differ, curves, results, samples."""
