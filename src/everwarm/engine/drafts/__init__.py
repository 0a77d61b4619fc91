"""Drafts: tokens that may come next, proposed from what was said before and verified in one step (ADR 23)."""
