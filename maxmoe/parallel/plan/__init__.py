"""The plan of `parallelize`: what is stored where, what is communicated, and how tokens reach experts."""
