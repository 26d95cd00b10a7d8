"""Infrastructure of every run: folder, signals, processes and errors."""
