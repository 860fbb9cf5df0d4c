"""Plug-ins that add radixtrain to other programs without a change of their code: one file for each host.

Nothing here imports more of radixtrain than `share_prefixes` does.
"""
