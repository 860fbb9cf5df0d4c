"""A run on several devices: which are accepted, how its processes start and find one another, and how they end."""
