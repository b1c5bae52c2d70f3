"""The training dialogues of the bundled model, made from a seed."""
