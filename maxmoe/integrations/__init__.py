"""What connects maxmoe with other libraries."""
