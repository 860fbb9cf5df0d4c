"""verl: `VERL_USE_EXTERNAL_PLUGINS=radixtrain` shares every model that a worker loads.

verl imports this file by its entry point, in each process that imports verl, Ray's workers too. With verl's default,
which imports every plug-in that is installed, nothing is shared. RADIXTRAIN_OPTIONS holds the options.
"""

import os

from radixtrain.plugins.from_pretrained import watch

if "radixtrain" in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").replace(" ", "").split(","):
    watch()
