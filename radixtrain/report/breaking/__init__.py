"""What breaks sharing: prompts that are nearly the same and part early, and why."""
