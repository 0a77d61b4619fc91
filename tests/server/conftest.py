"""Fixtures of all tests here: official clients of the `server` that a file of tests has."""

from speaking import claude, client  # noqa: F401
