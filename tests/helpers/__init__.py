"""Shared by the tests: small models, random convolutions, trainings in processes of their own."""
