"""radixtrain in other people's programs, without a line of code in them: one file for each host.

Nothing here imports more of radixtrain than `share_prefixes` does.
"""
