"""What a chat template runs in: a metered sandbox, marks on control tokens, the forms of messages it understands."""
