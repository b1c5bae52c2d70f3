"""The dialogues that the bundled model is trained on. All of them are made here, from a seed."""
