"""What a chat template needs around it: a metered sandbox, marks on control tokens, and the forms of messages it
understands."""
