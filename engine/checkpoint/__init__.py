"""From a name on the command line to a Weights value: find, read, check, load."""
