"""Families of models in transformers, one file each; `maxmoe.families.family.families` imports the files."""
