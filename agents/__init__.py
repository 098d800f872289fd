"""Policies compared under one protocol."""
