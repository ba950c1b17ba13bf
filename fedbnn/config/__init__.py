"""The configuration: typed constructors are the sections of the YAML file and the flags.

A schema (`schema`) says which sections there are. What a section may hold is read off the signature
of what it builds, so there is no second list of options. Later layers win: defaults, file, flags.
"""
