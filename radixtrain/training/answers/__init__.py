"""What the model says while it trains: answers to validation rows, what judges them, and where they go."""
