"""The `cpd` command, one file a subcommand. Imports the rest only when a subcommand needs it."""
