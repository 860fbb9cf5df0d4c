"""What breaks sharing: near-identical prompts that part early, and why they do."""
