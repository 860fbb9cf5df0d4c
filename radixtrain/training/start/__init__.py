"""Before the first step: the model is loaded, what is known to fail fails, and one screen says what will
happen."""
