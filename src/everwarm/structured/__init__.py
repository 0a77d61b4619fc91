"""Structured output: answers that follow a JSON schema, a regular expression or a grammar, by means of llguidance.

A `Grammar` says what an answer may be. `Grammars` compiles it, once, for the vocabulary of a model. What comes out
makes a constraint for each choice, which tells the engine, token by token, what may follow.
"""
