"""Generated cases are the same in every run, so that red is a change's doing; RADIXTRAIN_FUZZ=1 draws new ones."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("default" if os.environ.get("RADIXTRAIN_FUZZ") else "fixed")
