"""Functions, cases and small models that tests share."""
