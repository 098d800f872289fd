"""The folder that ms-swift puts first on `sys.path`: the shim, and nothing that could shadow another module."""
