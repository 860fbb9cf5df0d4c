"""The keys of the command line, as classes: a field is a key, with its values, limits, default and meaning.

Help, checks, files and the objects of a run read these classes. They import nothing slow.
"""
