"""Hands the winner of a plan or a tune to those who run it."""
