"""The plan of `parallelize`: what is stored where, what is gathered, and how tokens reach experts."""
