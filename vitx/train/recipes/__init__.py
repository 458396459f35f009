"""Recipes: everything that decides a training run, as one record; light, so that they can be read without torch."""
