"""Quicker CPU twins of ref functions, for serving without a GPU. conformance checks each against ref."""
