"""One file an architecture; the file name is the value of general.architecture."""
