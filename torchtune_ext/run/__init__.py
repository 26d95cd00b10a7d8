"""The parts that every run needs, whatever it trains: its folder, its signals, its processes."""
